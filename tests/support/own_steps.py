"""Optimizers as users write them, whose own `step` the engine calls tensor by tensor; and some that it cannot use."""

import torch


class Optimizer(torch.optim.Optimizer):
    """A step that treats each tensor with a gradient by itself."""

    def __init__(self, params, lr=1e-2, weight_decay=0.01, **more):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    self.one(p, p.grad, self.state[p], group)

    def one(self, p, gradient, state, group):
        p.add_(gradient, alpha=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """As the package schedulefree: counts and weights of steps are in the groups, a second iterate in the state."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(z, share).add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1


class Soap(Optimizer):
    """As Shampoo and SOAP: the first step only begins the state, and its lists of matrices are made anew at times."""

    def one(self, p, gradient, state, group):
        if not state:
            state["step"], state["roots"] = 0, None
            state["grams"] = [torch.zeros(side, side) for side in p.shape]
        for dim, gram in enumerate(state["grams"]):
            flat = gradient.transpose(0, dim).reshape(len(gram), -1)
            gram.lerp_(flat @ flat.T, 0.1)
        state["step"] += 1
        if state["step"] == 1:
            return
        if state["step"] % 4 == 2:
            state["roots"] = [torch.linalg.inv(gram + torch.eye(len(gram))) for gram in state["grams"]]
        for dim, root in enumerate(state["roots"]):
            other = gradient.transpose(0, dim)
            gradient = (root @ other.reshape(len(root), -1)).view(other.shape).transpose(0, dim)
        p.add_(gradient, alpha=-group["lr"])


class Split(Optimizer):
    """Matrices in one way and all others in another, by a flag of the group."""

    def one(self, p, gradient, state, group):
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(gradient, 0.1)
        if group["use_muon"]:
            p.add_(state["momentum"] / (state["momentum"].norm() + 1e-3), alpha=-group["lr"])
        else:
            p.add_(state["momentum"], alpha=-group["lr"])


def split(model):
    """Groups for `Split`."""
    wide = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return Split([{"params": wide, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-3}])


class DecaysAll(Split):
    """As Keller Jordan's SingleDeviceMuonWithAuxAdam, it also changes tensors that have no gradient."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        super().step()


class TensorCount(Optimizer):
    """Counts in a tensor in its group, in place."""

    def __init__(self, params):
        super().__init__(params, count=torch.tensor(1e6, dtype=torch.float64))

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            group["count"] += 1


OWN_STEPS = {
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2, weight_decay=0.1),
    "schedule-free": lambda m: ScheduleFree(m.parameters()),
    "SOAP": lambda m: Soap(m.parameters()),
    "split": split,
    "decays all": lambda m: DecaysAll(split(m).param_groups),
    "a tensor that counts": lambda m: TensorCount(m.parameters()),
    "torch's step": lambda m: type("Mine", (torch.optim.Adam,), {})(m.parameters(), lr=1e-2),
    "state from the constructor": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, maximize=True),
    "named": lambda m: torch.optim.Adamax(m.named_parameters(), lr=1e-2),
}


# Those that the engine refuses.


class NormOfAll(Optimizer):
    """Clips the gradients by itself."""

    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class RateOfFirst(Optimizer):
    """Uses the learning rate of its first group for all."""

    def one(self, p, gradient, state, group):
        p.add_(gradient, alpha=-self.param_groups[0]["lr"])


class Adaptive(Optimizer):
    """Its groups learn from gradients, as in D-Adaptation."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["d"] = group.get("d", 0.0) + sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        super().step()


class Sharpness(Optimizer):
    """As SAM."""

    def step(self, closure=None):
        assert closure is not None, "Sharpness requires a closure"
        with torch.enable_grad():
            closure()
        super().step()


class CountingItself(Optimizer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.count = 0

    def step(self):
        self.count += 1
        super().step()


class SharedState(Optimizer):
    def step(self):
        self.state["all"]["count"] = 1
        super().step()


class Noisy(Optimizer):
    def one(self, p, gradient, state, group):
        p.add_(gradient + torch.randn_like(p), alpha=-group["lr"])


class Wrapper(Optimizer):
    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=1e-2)
        super().__init__(self.inner.param_groups)

    def step(self):
        self.inner.step()


class WithOwnList(Optimizer):
    def __init__(self, params):
        super().__init__(params)
        self.mine = list(self.param_groups[0]["params"])


class WithMasters(Optimizer):
    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group["masters"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]


class Idle(Optimizer):
    def step(self):
        pass


class Broken(Optimizer):
    def one(self, p, gradient, state, group):
        raise RuntimeError("not on this machine")


def two_groups(kind):
    def make(model):
        parameters = list(model.parameters())
        return kind([{"params": parameters[:3]}, {"params": parameters[3:]}])

    return make


REFUSED = {
    "a closure": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be used: its step needs a closure"),
    "an optional closure": (lambda m: Sharpness(m.parameters()), "Sharpness cannot be used: its step needs a closure"),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam cannot be used: .*dense gradients"),
    "a norm": (lambda m: NormOfAll(m.parameters()), "NormOfAll cannot be used: its step depends on several tensors"),
    "a group": (two_groups(RateOfFirst), "RateOfFirst cannot be used: its step depends on several tensors"),
    "options": (lambda m: Adaptive(m.parameters()), "Adaptive cannot be used: its step depends on several tensors"),
    "an attribute": (lambda m: CountingItself(m.parameters()), "its step changes 'count', which is neither"),
    "a shared state": (lambda m: SharedState(m.parameters()), "its state has entries that belong to no tensor"),
    "noise": (lambda m: Noisy(m.parameters()), "Noisy cannot be used: its step d"),
    "wrapped": (lambda m: Wrapper(m.parameters()), "wrapped around another optimizer, 'inner'"),
    "a list": (lambda m: WithOwnList(m.parameters()), "it has parameters in 'mine', beside those"),
    "masters": (lambda m: WithMasters(m.parameters()), "it has parameters in 'masters', beside those"),
    "nothing": (lambda m: Idle(m.parameters()), "its step leaves all tensors as they are"),
    "an error": (lambda m: Broken(m.parameters()), "its step fails with RuntimeError.'not on this machine'"),
}
