"""Reads of weights while their updates are still under way.

A step returns before all of its updates are done, and the next step overlaps with them. Whoever reads a weight in
between must see the updated value, through whatever reference they have to the parameter.

Note [Watching reads]
While updates may be under way, the parameters are of a class whose `__torch_function__` torch calls for everything that
is done with them: a read first waits for the updates, then the parameters are given their own class back. They stay the
same objects, and only what says nothing about values (`_METADATA`) does not wait. Tensors that an earlier
`state_dict()` returned share the parameters' memory, so they are watched as well for as long as somebody keeps them.
Other aliases (a numpy view, an earlier `detach()`) cannot be noticed; they need `engine.wait()`.

Note [Forked children]
A forked child has neither the threads that make updates nor, on an accelerator, the memory of the weights
(`runtime/pinned.py`). There, all tensors of the model are of that class for good, and using their values raises.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

# What can be asked of a parameter without waiting: loops ask it between steps, and the answer is the same.
_GOT = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "is_leaf",
    "requires_grad",
    "retains_grad",
    "grad",
    "grad_fn",
    "grad_dtype",
    "itemsize",
    "nbytes",
    "is_meta",
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_SET = ("requires_grad", "grad", "grad_dtype")
_CALLED = [
    "size",
    "stride",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
]
_METADATA = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _GOT),
        *(getattr(torch.Tensor, name).__set__ for name in _SET),
        *(getattr(torch.Tensor, name).__delete__ for name in ("grad",)),
        *(getattr(torch.Tensor, name) for name in _CALLED),
        torch.numel,
        torch.is_floating_point,
    ]
)


_open: weakref.WeakSet[Reads] = weakref.WeakSet()


class Reads:
    """Has reads of weights wait for `settle`, from `begin` on until the first of them, or until `end`.

    `tensors` returns all tensors of the model that have the engine's memory, until `close`.
    """

    def __init__(self, settle: Callable[[], None], tensors: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self._settle = settle
        self._tensors = tensors
        self._in_child = False  # see Note [Forked children]
        self._lock = threading.Lock()  # other threads of the user's may read, too
        self._begun = 0  # how often
        self._refused: dict[int, str] = {}  # names of parameters, in a step
        self._watched: list[torch.Tensor] = []
        self._aliases: list[TensorWeakRef] = []
        self._many = 1000  # aliases, from which on those that are gone are forgotten
        self._watching = {kind: self._watching_class(kind) for kind in (nn.Parameter, torch.Tensor)}
        self._own = {watching: kind for kind, watching in self._watching.items()}
        _open.add(self)

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Updates of these parameters may be under way from now on."""
        with self._lock:
            self._begun += 1
            self._watch((*parameters, *self._living_aliases()))
            unknown = any(type(tensor) not in self._own for tensor in parameters)
        if unknown:
            self.settle()  # the class of a parameter of the user's own kind cannot be exchanged

    def end(self) -> None:
        """The engine itself reads weights from now on, behind their updates; or there is nothing to wait for."""
        self._check_process()
        with self._lock:
            self._end()

    def close(self) -> None:
        """The model gets its tensors back."""
        self.end()
        _open.discard(self)

    @contextlib.contextmanager
    def refused(self, names: Mapping[torch.Tensor, str]) -> Iterator[None]:
        """Within, the model runs for a step, and has other tensors for these parameters: who uses one of these, by a
        reference from before, would miss the step's updates, and its gradient would be lost."""
        with self._lock:
            self._end()
            self._refused = {id(tensor): name for tensor, name in names.items()}
            self._watch(names)
        try:
            yield
        finally:
            with self._lock:
                self._refused = {}
                self._end()

    def settle(self) -> None:
        """Blocks until all updates are done."""
        self._check_process()
        begun = self._begun
        try:
            self._settle()
        finally:
            with self._lock:
                if begun == self._begun:  # else another thread has made a step meanwhile
                    self._end()

    def remember(self, alias: torch.Tensor) -> None:
        """A tensor that was given to the user, and has the memory of a weight."""
        with self._lock:
            self._aliases.append(TensorWeakRef(alias))
            if len(self._aliases) > self._many:
                self._many = 1000 + 2 * len(self._living_aliases())

    def forked(self) -> None:
        """In a forked child: see Note [Forked children]."""
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._in_child = True
        self._watch((*self._tensors(), *self._living_aliases()))

    def _check_process(self) -> None:
        if self._in_child:
            raise ValueError(
                "the model belongs to an engine of the parent process, and a forked child cannot use the engine or the "
                "values of weights. Copy what the child needs before it is forked (a DataLoader forks its workers when "
                "it is iterated), or start the child with 'spawn' and give it a copy"
            )

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (watching := self._watching.get(type(tensor))) is not None:
                tensor.__class__ = watching
                self._watched.append(tensor)

    def _check_refused(self, arguments: Any) -> None:
        for leaf in torch.utils._pytree.tree_leaves(arguments):
            if (name := self._refused.get(id(leaf))) is not None:
                raise ValueError(
                    f"the parameter {name!r} is used in a step by a reference to it that was taken before. In a step "
                    f"the model has another tensor for it, on the device: take it from the model where it is used, "
                    f"and keep it there: resident=[{name!r}]"
                )

    def _end(self) -> None:
        for tensor in self._watched:
            tensor.__class__ = self._own[type(tensor)]
        self._watched.clear()

    def _living_aliases(self) -> list[torch.Tensor]:
        found = [(ref, alias) for ref in self._aliases if (alias := ref()) is not None]
        self._aliases = [ref for ref, _ in found]
        return [alias for _, alias in found]

    def _watching_class(self, kind: type[torch.Tensor]) -> type[torch.Tensor]:
        reads = self

        class Watched(kind):  # type: ignore[misc, valid-type]
            @classmethod
            def __torch_function__(
                cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if function in _METADATA:
                    with torch._C.DisableTorchFunctionSubclass():
                        return function(*args, **(kwargs or {}))
                if reads._refused:
                    reads._check_refused((args, kwargs))
                reads.settle()
                return function(*args, **(kwargs or {}))

            # Both would make objects of this class, if it were still the tensor's.

            def __deepcopy__(self, memo: dict[int, Any]) -> Any:
                reads.settle()
                return copy.deepcopy(self, memo)

            def __reduce_ex__(self, protocol: Any) -> Any:
                reads.settle()
                return self.__reduce_ex__(protocol)

        Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        return Watched


def _after_fork() -> None:
    for reads in list(_open):
        reads.forked()


os.register_at_fork(after_in_child=_after_fork)
