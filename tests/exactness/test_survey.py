"""What a survey of the user's variables keeps: bounded in bytes, and no tensor for longer than the user does."""

import weakref

import pytest
import torch
from torch import nn

from ferryman.exactness.survey import Survey

ELEMENTS = 1024  # of float32: 4 KiB


def model_with_tensors(number):
    model = nn.Module()
    for at in range(number):
        setattr(model, f"state{at}", torch.zeros(ELEMENTS))
    return model


def test_the_elements_that_a_survey_remembers_are_bounded_in_all():
    model = model_with_tensors(5)
    survey = Survey([(model, "model")], thorough=True, clones=3 * 4 * ELEMENTS)
    before = survey.capture()
    clones = [seen.elements for seen in before if hasattr(seen, "elements") and seen.elements is not None]
    assert sum(clone.nbytes for clone in clones) == 3 * 4 * ELEMENTS

    model.state0.add_(1)
    survey.put_back(before)
    assert not model.state0.any()

    before = survey.capture()
    model.state4.add_(1)  # found last: its version tells, but nobody remembers what it was
    assert [variable.name for variable in survey.changed(before)] == ["model.state4"]
    with pytest.raises(ValueError, match=r"model.state4 is edited in place .* too large to be restored"):
        survey.put_back(before)


def test_a_survey_of_a_step_keeps_no_tensor_alive():
    model = model_with_tensors(1)
    survey = Survey([(model, "model")], thorough=False)
    gone = weakref.ref(model.state0)
    model.state0 = torch.ones(ELEMENTS)
    assert gone() is None
    before = survey.capture()
    model.state0 = None
    assert [variable.name for variable in survey.changed(before)] == ["model.state0"]


def test_sparse_tensors_in_the_users_variables_are_surveyed():
    matrix = torch.eye(4).to_sparse()
    survey = Survey([({"matrix": matrix}, "table")], thorough=True)
    before = survey.capture()
    assert survey.changed(before) == []
    matrix.mul_(2)
    assert [variable.name for variable in survey.changed(before)] == ["table['matrix']"]
