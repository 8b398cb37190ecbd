import pytest
import torch
import torch_virtual

torch.set_num_threads(1)  # models are tiny here: threads would cost more than they give


@pytest.fixture
def virtual():
    """The virtual device, strict about races, with its link and capacity as they were before."""
    torch_virtual.clear_races()
    before = torch_virtual.set_link("virtual:0")
    _, capacity = torch_virtual.mem_get_info("virtual:0")
    with torch_virtual.strict():
        yield torch.device("virtual:0")
    torch_virtual.synchronize()
    torch_virtual.set_link("virtual:0", h2d=before.h2d, d2h=before.d2h, latency=before.latency, delay=before.delay)
    torch_virtual.set_capacity(capacity, "virtual:0")
    assert torch_virtual.races() == []


@pytest.fixture(params=["cpu", "virtual"])
def device(request):
    return request.getfixturevalue("virtual") if request.param == "virtual" else torch.device("cpu")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the ferryman crosses the river {i} times\n" for i in range(100)))
    return path
