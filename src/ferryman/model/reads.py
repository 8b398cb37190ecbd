"""Makes reads of weights wait for pending updates.

A step returns before all of its updates are done, and the next step overlaps with them. Code that reads a weight in
between must see the updated value, through any reference to the parameter.

Note [Watching reads]
While updates may be pending, the parameters have a class with a `__torch_function__`, which torch calls for every
operation on them. The first read waits for the updates and restores the parameters' own class. The objects stay the
same. Operations that do not depend on values (`_METADATA`) do not wait. Tensors from an earlier `state_dict()` share
the parameters' memory, so they are watched as well while they exist. Reads through other aliases (a numpy view, an
earlier `detach()`) cannot be detected; they need `engine.wait()`.

Note [Forked children]
A forked child does not have the threads that run updates and, on an accelerator, does not have the memory of the
weights (`runtime/pinned.py`). In the child, all tensors of the model keep that class, and using their values is an
error.
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

from ferryman.runtime.caller import Origin

# Attributes and methods that do not wait: training loops use them between steps, and updates do not change them.
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
    """Makes reads of weights call `wait_for_updates`, from `begin` until the first read or `end`.

    `tensors` returns all tensors of the model, which are watched in forked children until `close`.
    """

    def __init__(self, wait_for_updates: Callable[[], None], tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._wait_for_updates = wait_for_updates
        self._tensors = tensors
        self._origin = Origin()
        # Several threads of the user may read. Reentrant, since garbage collection may close the engine at any point.
        self._lock = threading.RLock()
        self._begun = 0  # the number of calls of `begin`
        self.were_used = False  # since `begin`, somebody may have read or edited values
        self._refused: dict[int, str] = {}  # in a step: names of parameters that must not be used, by identity
        self._watched: list[torch.Tensor] = []
        self._aliases: list[TensorWeakRef] = []
        self._max_aliases = 1000  # with more, references to aliases that no longer exist are dropped
        self._watching = {kind: self._watching_class(kind) for kind in (nn.Parameter, torch.Tensor)}
        self._own = {watching: kind for kind, watching in self._watching.items()}
        _open.add(self)

    def begin(self, parameters: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """Begins to watch these parameters, whose updates may be pending, and `others`, which have no updates."""
        with self._lock:
            self._begun += 1
            self._watch((*parameters, *others, *self._living_aliases()))
            self.were_used = any(type(tensor) not in self._own for tensor in others)  # it cannot be known
            unknown = any(type(tensor) not in self._own for tensor in parameters)
        if unknown:
            self.wait()  # a parameter of a subclass cannot be watched

    def end(self) -> None:
        """Stops watching, because no updates are pending, or because the engine itself orders its reads after them."""
        self._origin.check()
        with self._lock:
            self._end()

    def close(self) -> None:
        """Stops watching for good. Forked children may use the tensors again."""
        self.end()
        _open.discard(self)

    @contextlib.contextmanager
    def refused(self, names: Mapping[torch.Tensor, str]) -> Iterator[None]:
        """Context of a step, in which using these parameters is an error.

        In a step the model has other tensors in their place. Code that uses a reference from before the step would not
        see the current weights, and its gradient would be lost.
        """
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

    def wait(self) -> None:
        """Blocks until all updates are done."""
        self._origin.check()
        begun = self._begun
        self.were_used = True
        try:
            self._wait_for_updates()
        finally:
            with self._lock:
                if begun == self._begun:  # otherwise another thread has run a step in the meantime
                    self._end()

    def remember(self, alias: torch.Tensor) -> None:
        """Watches a tensor that was returned to the user and shares memory with a weight."""
        with self._lock:
            self._aliases.append(TensorWeakRef(alias))
            if len(self._aliases) > self._max_aliases:
                self._max_aliases = 1000 + 2 * len(self._living_aliases())

    def forked(self) -> None:
        """In a forked child: see Note [Forked children]."""
        self._lock = threading.RLock()  # a thread that does not exist here may have held the old one
        self._watch((*self._tensors(), *self._living_aliases()))

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (watching := self._watching.get(type(tensor))) is not None:
                tensor.__class__ = watching
                self._watched.append(tensor)

    def _check_refused(self, arguments: Any) -> None:
        for leaf in torch.utils._pytree.tree_leaves(arguments):
            if (name := self._refused.get(id(leaf))) is not None:
                raise ValueError(
                    f"the parameter {name!r} is used in a step through a reference from before the step. In a step "
                    "the model has another tensor in its place, on the device: use the attribute of the module, and "
                    f"keep the parameter on the device: resident=[{name!r}]"
                )

    def _end(self) -> None:
        for tensor in self._watched:
            tensor.__class__ = self._own.get(type(tensor), type(tensor))
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
                reads.wait()
                return function(*args, **(kwargs or {}))

            # Both wait first, since a copy would otherwise have this class.

            def __deepcopy__(self, memo: dict[int, Any]) -> Any:
                reads.wait()
                return copy.deepcopy(self, memo)

            def __reduce_ex__(self, protocol: Any) -> Any:
                reads.wait()
                return self.__reduce_ex__(protocol)

        Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        return Watched


def _after_fork() -> None:
    for reads in list(_open):
        reads.forked()


os.register_at_fork(after_in_child=_after_fork)
