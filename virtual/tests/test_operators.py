"""Operators, forward and backward, equal the CPU's to the bit."""

from __future__ import annotations

import pytest
import torch
import torch_virtual
from torch.nn import functional as F  # noqa: N812 - as everybody calls it


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


NETWORKS = {
    "embedding": (F.embedding, lambda: (index(50, 4, 9), leaf(50, 16))),
    "embedding with padding": (lambda i, w: F.embedding(i, w, padding_idx=3), lambda: (index(9, 40), leaf(9, 4))),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w), lambda: (index(50, 4, 9), leaf(50, 16))),
    "linear": (F.linear, lambda: (leaf(4, 9, 16), leaf(8, 16), leaf(8))),
    "linear in bf16": (
        F.linear,
        lambda: (leaf(4, 16, dtype=torch.bfloat16), leaf(8, 16, dtype=torch.bfloat16), leaf(8, dtype=torch.bfloat16)),
    ),
    "linear in fp64": (F.linear, lambda: (leaf(4, 16, dtype=torch.float64), leaf(8, 16, dtype=torch.float64))),
    "bilinear": (F.bilinear, lambda: (leaf(4, 5), leaf(4, 6), leaf(3, 5, 6))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), lambda: (leaf(4, 9, 16), leaf(16), leaf(16))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w), lambda: (leaf(4, 9, 16), leaf(16))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), lambda: (leaf(4, 16, 9), leaf(16), leaf(16))),
    "batch_norm": (
        lambda x, m, v, w, b: (F.batch_norm(x, m, v, w, b, training=True), m, v),
        lambda: (leaf(8, 6, 5), torch.zeros(6), torch.ones(6), leaf(6), leaf(6)),
    ),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), lambda: (leaf(2, 4, 20), leaf(8, 4, 3), leaf(8))),
    "conv1d, grouped and causal": (
        lambda x, w: F.conv1d(F.pad(x, (3, 0)), w, groups=4),
        lambda: (leaf(2, 4, 20), leaf(4, 1, 4)),
    ),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2), lambda: (leaf(2, 3, 16, 16), leaf(8, 3, 4, 4), leaf(8))),
    "conv2d, channels last": (
        lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w),
        lambda: (leaf(2, 3, 8, 8), leaf(4, 3, 3, 3)),
    ),
    "conv_transpose2d": (F.conv_transpose2d, lambda: (leaf(2, 3, 8, 8), leaf(3, 4, 3, 3))),
    "conv3d": (F.conv3d, lambda: (leaf(1, 2, 5, 5, 5), leaf(3, 2, 2, 2, 2))),
    "pools": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3)),
        lambda: (leaf(2, 3, 12, 12),),
    ),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
        lambda: (leaf(2, 3, 6, 6),),
    ),
    "activations": (
        lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.relu(x), x.sigmoid(), x.tanh(), F.mish(x)),
        lambda: (leaf(7, 33),),
    ),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)), lambda: (leaf(7, 33),)),
    "dropout": (lambda x: F.dropout(x, 0.3), lambda: (leaf(40, 33),)),
    "dropout2d, alpha_dropout": (
        lambda x: (F.dropout2d(x, 0.4), F.alpha_dropout(x, 0.2, training=True)),
        lambda: (leaf(4, 5, 6, 7),),
    ),
    "cross_entropy": (
        lambda x, y: (F.cross_entropy(x, y, ignore_index=2), F.cross_entropy(x, y, label_smoothing=0.1)),
        lambda: (leaf(30, 11), index(11, 30)),
    ),
    "mse, l1, huber": (
        lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.huber_loss(x, y)),
        lambda: (leaf(30), leaf(30)),
    ),
    "bce, kl": (
        lambda x, y: (
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        ),
        lambda: (leaf(9, 30), leaf(9, 30)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_operators(on_both, name):
    function, make = NETWORKS[name]
    on_both(function, *make())


@pytest.mark.parametrize("p", [0.1, 0.15, 1 / 3, 0.5, 0.77, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_at_every_rate(on_both, p, dtype):
    on_both(lambda x: F.dropout(x, p), leaf(1000, dtype=dtype))


@pytest.mark.parametrize("how", ["plain", "causal", "mask", "boolean mask", "dropout", "scale", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_dot_product_attention(on_both, how, dtype):
    heads = 2 if how == "grouped" else 4
    q = leaf(2, 4, 10, 8, dtype=dtype)
    k, v = (leaf(2, heads, 10, 8, dtype=dtype) for _ in range(2))
    options = {
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.2},
        "scale": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }.get(how, {})
    mask = []
    if how == "mask":
        mask = [torch.randn(2, 1, 10, 10, dtype=dtype)]
    elif how == "boolean mask":
        mask = [torch.rand(10, 10) < 0.8]
    on_both(lambda q, k, v, *m: F.scaled_dot_product_attention(q, k, v, *m, **options), q, k, v, *mask)


def test_eager_attention(on_both):
    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2) / 8**0.5
        causal = torch.ones(10, 10, dtype=torch.bool, device=q.device).triu(1)
        return F.dropout(scores.masked_fill(causal, float("-inf")).softmax(-1), 0.1) @ v

    on_both(attend, leaf(2, 4, 10, 8), leaf(2, 4, 10, 8), leaf(2, 4, 10, 8))


def test_multihead_attention_module(same):
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)
    results = []
    for device in ("cpu", "virtual"):
        module = module.to(device)
        module.zero_grad()
        x = torch.linspace(-1, 1, 160).view(2, 5, 16).to(device)
        torch.manual_seed(0)
        y, _ = module(x, x, x, need_weights=False)
        y.sum().backward()
        results.append([y, [p.grad.cpu() for p in module.parameters()]])
    same(*results)


OPTIMIZERS = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, foreach, amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "Adam, one by one": (torch.optim.Adam, {"foreach": False}),
    "SGD, fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "SGD, foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"foreach": True}),
    "Adafactor": (torch.optim.Adafactor, {"foreach": False}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(same, name):
    kind, options = OPTIMIZERS[name]
    results = []
    for device in ("cpu", "virtual"):
        torch.manual_seed(5)
        parameters = [torch.randn(s).to(device).requires_grad_() for s in ((30, 7), (7,), (3, 3, 3), (1,))]
        optimizer = kind(parameters, lr=0.01, **options)
        for step in range(3):
            for p in parameters:
                p.grad = torch.sin(p.detach() * (step + 1))
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        results.append([parameters, norm])
    same(*results)


def test_a_fused_optimizer_keeps_its_state_on_the_device():
    p = torch.zeros(5, device="virtual", requires_grad=True)
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(v.device == p.device for v in optimizer.state[p].values())


EXPERTS = {
    "topk": (lambda x, i: x.topk(3, dim=-1), lambda: (leaf(20, 8), index(8, 20))),
    "sort, argsort": (
        lambda x, i: (*x.sort(descending=True), x.argsort(-1), *i.sort(stable=True)),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "bincount": (
        lambda x, i: (i.bincount(minlength=10), i.bincount(weights=x.detach()[:, 0])),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "one_hot": (lambda x, i: F.one_hot(i, 8), lambda: (leaf(20, 8), index(8, 20))),
    "index_add": (lambda x, i: torch.zeros_like(x).index_add(0, i, x), lambda: (leaf(20, 8), index(20, 20))),
    "index_add_ with alpha": (
        lambda x, i: torch.ones(9, 8, device=x.device).index_add_(0, i, x, alpha=0.5),
        lambda: (leaf(20, 8), index(9, 20)),
    ),
    "index_select, gather, take": (
        lambda x, i: (x.index_select(1, i), x.gather(1, i[:8].repeat(20, 1)), x.take(i)),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "scatter": (
        lambda x, i: (
            torch.zeros_like(x).scatter(1, i.view(20, 1), x[:, :1]),
            torch.zeros_like(x).scatter_add(1, i.view(20, 1), x[:, :1]),
            torch.zeros_like(x).scatter_reduce(1, i.view(20, 1), x[:, :1], "amax"),
        ),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "nonzero, where, unique": (
        lambda x, i: (i.nonzero(), *torch.where(i > 3), *i.unique(return_inverse=True, return_counts=True)),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "searchsorted, bucketize": (
        lambda x, i: (torch.searchsorted(i.sort().values, i), torch.bucketize(i, i.unique())),
        lambda: (leaf(20, 8), index(8, 20)),
    ),
    "grouped product": (
        lambda x, w: torch._grouped_mm(x, w, offs=torch.tensor([8, 16, 24], dtype=torch.int32, device=x.device)),
        lambda: (leaf(24, 16, dtype=torch.bfloat16), leaf(3, 16, 8, dtype=torch.bfloat16)),
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_operators_of_experts(on_both, name):
    function, make = EXPERTS[name]
    on_both(function, *make())


def test_histc_counts_integers_as_accelerators_do(same):
    x = torch.randint(8, (100,))
    for dtype in (torch.int32, torch.int64, torch.float32):
        counts = torch.histc(x.to(dtype).to("virtual"), bins=8, min=0, max=7)
        assert counts.dtype == dtype
        same(counts.long(), x.bincount(minlength=8))


def test_no_operator_draws_from_the_cpus_generator():
    """All random operators take a generator, and get the device's, or are known here and dealt with."""
    known = {
        "aten::native_dropout",  # has a kernel of its own
        "aten::_scaled_dot_product_flash_attention_for_cpu",  # refuses dropout
        "aten::_fused_sdp_choice",  # only chooses
    }
    found = set()
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        if not any(argument.name == "generator" for argument in op._schema.arguments):
            found.add(name)
    assert found <= known
    q = torch.randn(1, 1, 4, 8, device="virtual")
    with pytest.raises(RuntimeError, match="dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout_p=0.5)
    assert torch_virtual.race_count() == 0


def test_forward_mode_differentiation() -> None:
    """Where an input has no tangent, PyTorch makes zeros that have no memory."""
    x, tangent, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16, 8)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((x @ w).relu(), (8,)).sin().sum(0)

    here = torch.func.jvp(lambda x: function(x, weight), (x,), (tangent,))
    there = weight.to("virtual")
    found = torch.func.jvp(lambda x: function(x, there), (x.to("virtual"),), (tangent.to("virtual"),))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, here, strict=True))


def test_zeros_without_memory() -> None:
    before = torch_virtual.memory_allocated()
    zeros = torch._efficientzerotensor(1000, device="virtual")
    assert torch_virtual.memory_allocated() == before
    assert torch.equal((zeros + torch.ones(1000, device="virtual")).cpu(), torch.ones(1000))
