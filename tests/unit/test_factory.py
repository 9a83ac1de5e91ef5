"""Compressors by name, policies, and what is said about them."""

import dataclasses
import pickle

import pytest
import torch

import hvd_compress as hc
from hvd_compress.compressors import ALL

SPEC = hc.TensorSpec((100, 100), "float32")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 32)
        self.conv = torch.nn.Conv2d(16, 32, 3)
        self.out = torch.nn.Linear(64, 64)
        self.norm = torch.nn.LayerNorm(64)


@pytest.mark.parametrize("name", ALL)
def test_every_compressor_is_made_by_its_name(name):
    needed = {f.name: 0.5 for f in dataclasses.fields(ALL[name]) if f.name in ("ratio", "tau")}
    assert type(hc.make(name, **needed)) is ALL[name]
    assert type(hc.make(ALL[name].__name__, **needed)) is ALL[name]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("topq", {}, "did you mean topk?"),
        ("Power-SDG", {}, "did you mean powersgd?"),
        ("topk", {"ration": 0.1}, "did you mean ratio?"),
        ("topk", {}, "ratio"),
        ("qsgd", {"bits": 9}, "QSGD.bits must be"),
    ],
)
def test_what_cannot_be_made_is_said(name, settings, message):
    with pytest.raises(hc.ConfigError) as caught:
        hc.make(name, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"compressor": "topk", "memory": "residual", "compress_ratio": 0.3}, "TopK(0.3)"),
        ({"compressor": "topk", "memory": "none", "compress_ratio": 0.3}, "TopK(0.3, feedback=None)"),
        ({"compressor": "randomk", "compress_ratio": 0.1, "world_size": 4}, "RandomK(0.1)"),
        ({"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.01, "momentum": 0.5}, "DGC(0.01, momentum=0.5)"),
        ({"compressor": "qsgd", "quantum_num": 64}, "QSGD(8, norm='l2')"),
        ({"compressor": "qsgd", "quantum_num": 7}, "QSGD(4, norm='l2')"),
        ({"compressor": "powersgd", "memory": "powersgd", "compress_rank": 2}, "PowerSGD(2)"),
        ({"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.1}, "EFSign()"),
        ({"compressor": "threshold", "memory": "residual", "threshold": 0.01}, "Threshold(0.01)"),
        ({}, "NoCompression()"),
    ],
)
def test_params_of_grace(params, expected):
    assert repr(hc.from_grace(params)) == expected


def test_params_of_grace_that_have_no_counterpart(caplog):
    made = hc.from_grace({"compressor": "dgc", "compress_ratio": 0.01, "gradient_clipping": True})
    assert repr(made) == "DGC(0.01)" and "gradient_clipping" in caplog.text
    with pytest.raises(hc.ConfigError, match="did you mean topk"):
        hc.from_grace({"compressor": "topkk"})
    with pytest.raises(hc.ConfigError, match="expected a memory among"):
        hc.from_grace({"compressor": "topk", "memory": "elsewhere"})


def test_the_first_rule_that_fits_decides():
    low_rank = hc.PowerSGD(2)
    policy = hc.Policy(
        {"*.bias": None, hc.Rule(ndim=4): low_rank, hc.Rule("out.*", min_numel=100): hc.QSGD(4), "out.*": hc.FP16()},
        default=hc.TopK(0.01),
    )

    def chosen(name, *shape):
        return repr(policy.choose(name, hc.TensorSpec(shape, "float32")))

    assert chosen("conv.bias", 100) == "NoCompression()"
    assert policy.choose("conv.weight", hc.TensorSpec((8, 8, 3, 3), "float32")) is low_rank
    assert chosen("out.weight", 10, 10) == "QSGD(4)"
    assert chosen("out.small", 2, 2) == "FP16()"
    assert chosen("fc.weight", 10, 10) == "TopK(0.01)"
    assert chosen("in.OUT.weight", 10, 10) == "TopK(0.01)"


def test_embeddings_are_dense_without_rules():
    policy = hc.Policy(default=hc.TopK(0.01))
    for name in ("embedding.weight", "transformer.wte.weight", "wpe.weight", "model.embed_tokens.weight"):
        assert not policy.choose(name, SPEC).compresses(SPEC), name
    assert policy.choose("h.0.attn.weight", SPEC).compresses(SPEC)


def test_rules_for_modules():
    policy = hc.Policy({hc.Rule(module="Embedding"): None}, default=hc.TopK(0.01))
    with pytest.raises(hc.ConfigError, match=r"call policy.bind_modules\(model\) first"):
        policy.choose("embedding.weight", SPEC)
    policy.bind_modules(Net())
    assert not policy.choose("embedding.weight", SPEC).compresses(SPEC)
    assert policy.choose("out.weight", SPEC).compresses(SPEC)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rules": {3: None}},
        {"rules": {"*": "topk"}},
        {"rules": [("*", None)]},
        {"default": hc.TopK},
        {"default": hc.Policy(default=hc.TopK(0.1))},
    ],
)
def test_what_is_no_rule_is_refused(arguments):
    with pytest.raises(hc.ConfigError, match="Policy"):
        hc.Policy(**arguments)


def test_a_policy_is_copied_and_compared():
    policy = hc.Policy({"*.bias": None}, default=hc.TopK(0.01))
    assert pickle.loads(pickle.dumps(policy)).settings() == policy.settings()
    assert policy.settings() != hc.Policy({"*.bias": None}, default=hc.TopK(0.02)).settings()


def test_describe():
    text = hc.Policy({"embedding.*": None, hc.Rule(ndim=4): hc.PowerSGD(2)}, default=hc.TopK(0.01)).describe(Net())
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert "dense" in rows["embedding.weight"] and rows["embedding.weight"].split()[-2:] == ["25,600", "25,600"]
    # 32 x 144 in two factors of rank 2, padded to the larger one.
    assert "PowerSGD(2)" in rows["conv.weight"] and rows["conv.weight"].endswith("1,152")
    assert "TopK(0.01)" in rows["out.weight"]
    assert "dense" in rows["norm.weight"]
    dense, sent = (int(n.replace(",", "")) for n in rows["all"].split()[-2:])
    assert dense == sum(4 * p.numel() for p in Net().parameters()) and sent < dense


def test_describe_says_what_is_only_a_limit():
    rows = hc.AdaptiveThreshold(0.01).describe(Net()).splitlines()
    assert "<= " in rows[-1] and "or more" in rows[-1] and "<= " in rows[1]
    assert "<=" not in hc.TopK(0.01).describe(Net())


def test_a_policy_may_be_one_of_those_that_are_switched_between():
    policy = hc.Policy({"conv*": None}, default=hc.PowerSGD(2))
    switch = hc.Switch({0: hc.NoCompression(), 10: policy})
    chosen = switch.choose("out.weight", SPEC)
    assert chosen is switch.choose("other.weight", SPEC)
    assert repr(chosen.at(9)) == "NoCompression()" and type(chosen.at(10)) is hc.PowerSGD
    assert not switch.choose("conv.weight", SPEC).compresses(SPEC) and switch.compresses(SPEC)
    assert "PowerSGD(2)" in switch.describe(Net()) and " dense " in switch.describe(Net())


def test_schedules():
    steps = hc.warm_up(0.001, 1000)
    assert [round(v, 4) for v in steps.stages()] == [0.25, 0.0629, 0.0158, 0.004, 0.001]
    compressor = hc.TopK(steps)
    assert [compressor.at(n).kept(SPEC) for n in (0, 249, 250, 999, 1000, 10**6)] == [2500, 2500, 629, 40, 10, 10]
    assert compressor.at(5) is compressor.at(6)
    switch = hc.Switch({0: hc.NoCompression(), 10: hc.PowerSGD(2), 13: hc.TopK(0.1)})
    kinds = [type(switch.at(n)).__name__ for n in (0, 9, 10, 12, 13)]
    assert kinds == ["NoCompression", "NoCompression", "PowerSGD", "PowerSGD", "TopK"]
    assert [switch.stages[switch.stage(n)] is switch.at(n) for n in (0, 9, 10, 11, 12, 13, 99)] == [True] * 7
    for wrong in ({}, {1: 0.1}, {0.5: 1}, {True: 0.1, 0: 0.1}):
        with pytest.raises(hc.ConfigError, match="Steps expected"):
            hc.Steps(wrong)
    for wrong in ({}, {1: hc.Int8()}, {0: "topk"}, {0: hc.Switch({0: hc.Int8()})}):
        with pytest.raises(hc.ConfigError, match="Switch expected"):
            hc.Switch(wrong)
    for arguments in ((0.5, 10, 4, 0.25), (0.1, 2, 4), (0.1, 10, 0)):
        with pytest.raises(hc.ConfigError, match="warm_up expected"):
            hc.warm_up(*arguments)


@pytest.mark.parametrize("setting", [{"min_numel": 5}, {"seed": 1}, {"feedback": hc.ErrorFeedback()}])
def test_settings_without_effect_are_refused(setting):
    for make in (
        lambda **kw: hc.Switch({0: hc.Int8()}, **kw),
        lambda **kw: hc.Policy({}, default=hc.Int8(), **kw),
    ):
        with pytest.raises(hc.ConfigError, match="would have no effect; give it to the compressors in it"):
            make(**setting)
    with pytest.raises(hc.ConfigError, match=r"RandomK\.block must be 1 with order='rolling'"):
        hc.RandomK(0.1, order="rolling", block=4)
