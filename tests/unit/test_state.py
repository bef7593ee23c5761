"""What is tracked goes to a peer and comes back bit for bit, whatever kinds of objects it is in."""

from __future__ import annotations

import contextlib
import copy
import enum
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from everstep.recovery import state
from everstep.recovery.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as sched

warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


class Colour(enum.Enum):
    RED = "r"


Pair = namedtuple("Pair", "left right")


class Box:
    """The simplest thing that can be tracked."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def arrived(snap: state.Snapshot) -> list[torch.Tensor]:
    """The tensors of a snapshot as a peer gets them: by their bytes only."""
    out = []
    for spec, tensor in zip(state.specs(snap.skeleton), snap.tensors, strict=True):
        new = state.empty_like_spec(spec, "cpu")
        state.as_bytes(new)[:] = state.as_bytes(state.to_wire(tensor))
        out.append(new)
    return out


def give(donor: dict[str, Any], receiver: dict[str, Any]) -> None:
    snap = state.snapshot(donor)
    state.load(receiver, snap.skeleton, arrived(snap))


def through(value: Any) -> Any:
    box = Box()
    give({"box": Box(value)}, {"box": box})
    return box.value


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *others: Any, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4, generator=generator).to(dtype)).float().square().mean()
        loss.backward()
        needs_closure = isinstance(optimizer, torch.optim.LBFGS)
        optimizer.step((lambda loss=loss: loss) if needs_closure else None)
        for other in others:
            other(loss)


# ------------------------------------------------------------------ values

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.text(), st.binary(),
    st.floats(), st.complex_numbers(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]),
    st.sampled_from([Colour.RED, range(3)]),
    st.integers(-128, 127).map(np.int8), st.floats().map(np.float64), st.floats(width=32).map(np.float32),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()), st.binary())
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8,
     torch.complex64, torch.float8_e4m3fn, torch.uint16]
)  # fmt: skip


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype, shape = draw(dtypes), draw(st.lists(st.integers(0, 3), max_size=3))
    out = torch.zeros(shape, dtype=dtype)
    raw = state.as_bytes(out)
    top = 2 if dtype is torch.bool else 256
    raw[:] = bytes(draw(st.lists(st.integers(0, top - 1), min_size=len(raw), max_size=len(raw))))
    return out.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else out


nests = st.recursive(
    st.one_of(scalars, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.dictionaries(st.text(), st.integers(), max_size=3).map(Counter),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.tuples(inner, inner).map(lambda t: Pair(*t)),
    ),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """A value as something that `==` compares bit for bit, kinds and order included."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, bytes(state.as_bytes(state.to_wire(value)))
    if isinstance(value, np.generic | np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        factory = value.default_factory if isinstance(value, defaultdict) else None
        return kind, factory, [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return kind, [bits(v) for v in value]
    return kind, value


@settings(max_examples=150, deadline=None)
@given(nests)
def test_any_nest_of_plain_values_and_tensors_comes_back_bit_for_bit(value: Any) -> None:
    assert bits(through(value)) == bits(value)


@settings(max_examples=60, deadline=None)
@given(nests)
def test_equal_nests_have_equal_digests(value: Any) -> None:
    assert state.digest({"x": Box(value)}) == state.digest({"x": Box(through(value))})


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.nan, struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0], math.inf, -0.0, 5e-324],
)
def test_unusual_floats_keep_their_bits(value: float) -> None:
    assert struct.pack("<d", through(value)) == struct.pack("<d", value)


def test_strings_that_are_not_utf8_and_arrays_of_any_order_come_back() -> None:
    assert through({"\udce9": torch.ones(1)})["\udce9"].item() == 1
    assert through("\udce9t\u00e9") == "\udce9t\u00e9"
    array = np.asfortranarray(np.arange(6000, dtype=">i4").reshape(60, 100))
    back = through({"a": array})["a"]
    assert back.dtype == array.dtype and np.array_equal(back, array)
    assert through(np.empty((0, 3))).shape == (0, 3)
    assert through(np.array("abc"))[()] == "abc"
    frozen = np.arange(2000.0)
    frozen.flags.writeable = False
    assert np.array_equal(through(frozen), frozen)


def test_a_subclass_of_int_travels_as_the_number() -> None:
    class Step(int):
        pass

    assert bits(through({"at": Step(7)})) == bits({"at": 7})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [1, lambda x: x]}, "a function at 'a.1'"),
        ({"a": {"b": object()}}, "an object of class object at 'a.b'"),
        ({"a": np.array([None])}, "a NumPy array of object at 'a'"),
        ({"a": torch.eye(2).to_sparse()}, "a sparse_coo tensor at 'a'"),
        ({"a": torch.empty(2, device="meta")}, "without content"),
        ({"a": defaultdict(lambda: 0)}, "a defaultdict whose factory is a function at 'a'"),
        ({"a": nn.UninitializedParameter()}, "uninitialized"),
        (int, "the class int at 'the top'"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_place_in_one_line(value: Any, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        state.snapshot({"thing": Box(value)})
    message = str(caught.value)
    assert message.startswith("track(thing=…): ")
    assert what in message and "\n" not in message


def test_a_container_in_itself_and_a_bottomless_one_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UsageError, match="contains itself"):
        state.snapshot({"x": Box(loop)})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="too deep"):
        state.snapshot({"x": Box(deep)})


def test_only_what_has_both_methods_can_be_tracked() -> None:
    state.check("model", net())
    for thing in (3, {"a": 1}, torch.ones(1), nn.Module):
        with pytest.raises(UsageError, match=r"track\(thing=…\).*state_dict"):
            state.check("thing", thing)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_skeleton_is_an_error_and_nothing_else(data: st.DataObject) -> None:
    good = state.snapshot({"x": Box({"a": [1.5, (2, "b")], "c": torch.ones(2), "d": Pair(1, Colour.RED)})})
    raw = bytearray(good.skeleton)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError, UsageError):
        state.load({"x": Box()}, bytes(raw), [torch.ones(2)])


def test_a_class_named_in_a_skeleton_is_only_ever_an_enum_or_a_named_tuple() -> None:
    good = state.snapshot({"x": Box(Colour.RED)})
    evil = good.skeleton.replace(b"\xa6Colour", b"\xa6Exploit"[:7])
    with pytest.raises(ValueError, match="not imported here"):
        state.load({"x": Box()}, evil, [])


# ------------------------------------------------------------------ models


def test_wrapped_models_have_the_names_and_the_digest_of_the_users_own() -> None:
    model = net()
    plain = state.snapshot({"model": model})
    compiled = torch.compile(model)
    assert state.snapshot({"model": compiled}).skeleton == plain.skeleton
    inner = nn.Sequential(torch.compile(model[0]), *model[1:])
    assert state.digest({"model": inner}) == state.digest({"model": model})
    other = net()
    inner_other = nn.Sequential(torch.compile(other[0]), *other[1:])
    give({"model": model}, {"model": inner_other})
    assert state.digest({"model": other}) == state.digest({"model": model})
    assert [s.path for s in state.specs(plain.skeleton)][:2] == ["model.0.weight", "model.0.bias"]


def test_a_model_in_distributed_data_parallel_is_tracked_as_itself() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert state.digest({"model": wrapped}) == state.digest({"model": model})
        target = net()
        give({"model": wrapped}, {"model": target})
        assert state.digest({"model": target}) == state.digest({"model": model})
    finally:
        torch.distributed.destroy_process_group()


def test_a_snapshot_copies_nothing_and_a_module_is_written_in_place() -> None:
    donor, model = net(), net()
    snap = state.snapshot({"model": donor})
    assert snap.tensors[0].data_ptr() == donor[0].weight.data_ptr()
    before = {name: (t, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    give({"model": donor}, {"model": model})
    for name, t in model.state_dict(keep_vars=True).items():
        assert t is before[name][0] and t.data_ptr() == before[name][1]
    assert state.digest({"model": donor}) == state.digest({"model": model})


def test_tied_weights_are_sent_once_and_stay_tied() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    donor, model = tied(), tied()
    assert len(state.snapshot({"model": donor}).tensors) == 1
    give({"model": donor}, {"model": model})
    assert model[1].weight is model[0].weight
    untied = copy.deepcopy(donor)
    untied[1].weight = nn.Parameter(donor[0].weight.detach().clone())
    assert state.digest({"model": untied}) == state.digest({"model": donor})


def test_buffers_outside_the_state_dict_go_along() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(2), persistent=False)
            self.register_buffer("late", None, persistent=False)

    donor, model = nn.Sequential(Cache()), nn.Sequential(Cache())
    donor[0].seen += 3
    donor[0].late = torch.arange(4)
    give({"model": donor}, {"model": model})
    assert model[0].seen.tolist() == [3, 3] and model[0].late.tolist() == [0, 1, 2, 3]
    assert "0.late" not in model.state_dict()
    give({"model": nn.Sequential(Cache())}, {"model": model})
    assert model[0].late is None


def test_a_modules_own_loading_code_runs() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.count, self.calls = nn.Parameter(torch.ones(2)), 0, 0
            self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "calls", 1))

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, value: Any) -> None:
            self.count = value["count"]

    donor, model = Extra(), Extra()
    donor.count = 5
    with torch.no_grad():
        donor.w.mul_(3)
    give({"model": donor}, {"model": model})
    assert (model.count, model.calls, model.w.tolist()) == (5, 1, [3, 3])


def test_models_of_other_shapes_are_told_apart_in_words() -> None:
    a = state.snapshot({"model": net(), "box": Box(1)}).skeleton
    wide = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))
    b = state.snapshot({"model": wide, "box": Box(2)}).skeleton
    assert state.layout(a) != state.layout(b)
    words = state.describe_mismatch(a, b, "on rank 0", "on rank 2")
    assert words == "model.0.weight is float32 [8, 4] on rank 0 but float32 [9, 4] on rank 2"
    assert "box" in state.describe_mismatch(a, state.snapshot({"model": net()}).skeleton)
    assert state.describe_mismatch(a, a) == ""
    with pytest.raises(UsageError, match=r"does not fit.*model\.0\.weight is float32 \[9, 4\] here"):
        give({"model": net(), "box": Box(1)}, {"model": wide, "box": Box(1)})


def test_the_layout_does_not_change_when_optimizer_state_appears() -> None:
    model = net()
    objs = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    before = state.snapshot(objs).skeleton
    train(model, objs["optimizer"], 1)
    after = state.snapshot(objs).skeleton
    assert before != after and state.layout(before) == state.layout(after)


# ------------------------------------------------------------------ optimizers, schedulers and the like

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_optimizer_is_restored_exactly_and_trains_on_alike(kind: str, ahead: int) -> None:
    donor, model = net(), net()
    theirs, ours = OPTIMIZERS[kind](donor.parameters()), OPTIMIZERS[kind](model.parameters())
    train(donor, theirs, 3)
    train(model, ours, ahead, seed=5)  # a receiver with and without state of its own
    a, b = {"model": donor, "opt": theirs}, {"model": model, "opt": ours}
    give(a, b)
    assert state.digest(a) == state.digest(b)
    train(donor, theirs, 2, seed=9)
    train(model, ours, 2, seed=9)
    assert state.digest(a) == state.digest(b)


def test_a_donor_before_its_first_step_leaves_a_receiver_without_state() -> None:
    donor, model = net(), net()
    theirs, ours = torch.optim.AdamW(donor.parameters()), torch.optim.AdamW(model.parameters())
    train(model, ours, 2)
    give({"m": donor, "o": theirs}, {"m": model, "o": ours})
    assert not ours.state
    assert state.digest({"m": donor, "o": theirs}) == state.digest({"m": model, "o": ours})


def test_float32_moments_of_bfloat16_parameters_keep_their_bits() -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            optimizer.state[p] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn(p.shape),
                "exp_avg_sq": torch.rand(p.shape),
                "note": "kept",
                "history": [torch.randn(2), (1, torch.rand(3))],
            }
        return model, optimizer

    (donor, theirs), (model, ours) = pair(), pair()
    give({"m": donor, "o": theirs}, {"m": model, "o": ours})
    assert ours.state[model.weight]["exp_avg"].dtype is torch.float32
    assert ours.state[model.weight]["note"] == "kept"
    assert state.digest({"m": donor, "o": theirs}) == state.digest({"m": model, "o": ours})


def test_parameters_groups_and_state_dicts_stay_the_same_objects() -> None:
    donor, model = net(), net()
    theirs = torch.optim.Adam(donor.parameters(), lr=torch.tensor(0.5))
    ours = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    train(donor, theirs, 1)
    held, groups, group, lr = ours.state, ours.param_groups, ours.param_groups[0], ours.param_groups[0]["lr"]
    params = list(group["params"])
    give({"o": theirs, "m": donor}, {"o": ours, "m": model})
    assert ours.state is held and ours.param_groups is groups and groups[0] is group and group["lr"] is lr
    assert lr.item() == 0.5
    assert all(a is b for a, b in zip(params, group["params"], strict=True))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: sched.LambdaLR(o, lambda s: 0.9**s),
    "lambda object": lambda o: sched.LambdaLR(o, Decay()),
    "multiplicative": lambda o: sched.MultiplicativeLR(o, lambda s: 0.9),
    "one cycle": lambda o: sched.OneCycleLR(o, 0.1, total_steps=50),
    "warm restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3, 2),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 10),
    "multi step": lambda o: sched.MultiStepLR(o, [1, 3, 3]),
    "cyclic": lambda o: sched.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "cyclic custom": lambda o: sched.CyclicLR(o, 0.01, 0.1, scale_fn=lambda x: 0.5, cycle_momentum=False),
    "sequential": lambda o: sched.SequentialLR(o, [sched.LinearLR(o), sched.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: sched.ChainedScheduler([sched.LinearLR(o), sched.ExponentialLR(o, 0.9)]),
    "polynomial": lambda o: sched.PolynomialLR(o),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


class Decay:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, step: int) -> float:
        self.seen += 1
        return 1 / (1 + self.seen)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_is_restored_exactly_and_goes_on_alike(kind: str) -> None:
    def make(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        train(model, optimizer, steps, lambda _: scheduler.step())
        return model, optimizer, scheduler

    names = ("model", "optimizer", "scheduler")
    a, b = dict(zip(names, make(4), strict=True)), dict(zip(names, make(0), strict=True))
    give(a, b)
    for _ in range(3):
        assert state.digest(a) == state.digest(b)
        for x in (a, b):
            train(x["model"], x["optimizer"], 1, lambda _, s=x["scheduler"]: s.step(), seed=3)


def test_plateau_grad_scaler_and_averaged_model_are_restored() -> None:
    def make(steps: int) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        plateau = sched.ReduceLROnPlateau(optimizer, patience=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        ema = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for i in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((4, 4), float(i))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            plateau.step(float(i))
            ema.update_parameters(model)
        return {"model": model, "opt": optimizer, "plateau": plateau, "scaler": scaler, "ema": ema}

    a, b = make(3), make(1)
    give(a, b)
    assert state.digest(a) == state.digest(b)
    assert b["scaler"].get_scale() == a["scaler"].get_scale() != 8.0
    assert b["ema"].n_averaged.item() == 3


# ------------------------------------------------------------------ sharing memory


def test_what_two_objects_shared_at_the_donor_is_not_shared_at_the_receiver() -> None:
    model, shadow, other = net(), Box(), Box()
    shadow.value = {"w": model[0].weight}
    target = net()
    give({"ema": shadow, "model": model}, {"ema": other, "model": target})
    assert other.value["w"].data_ptr() != target[0].weight.data_ptr()
    with torch.no_grad():
        target[0].weight.add_(1)
    assert torch.equal(other.value["w"], model[0].weight)


def test_what_one_object_holds_twice_is_still_one_tensor() -> None:
    t = torch.zeros(3)
    back = through({"a": t, "b": [t]})
    back["a"].add_(1)
    assert back["b"][0].tolist() == [1, 1, 1]


def test_receiving_lands_in_live_memory_where_nothing_else_lies() -> None:
    donor, model = net(), net()
    theirs, ours = torch.optim.AdamW(donor.parameters()), torch.optim.AdamW(model.parameters())
    train(donor, theirs, 2)
    a, b = {"model": donor, "opt": theirs}, {"model": model, "opt": ours}
    snap = state.snapshot(a)
    places = state.landing(b, snap.skeleton, "cpu")
    live = {t.data_ptr() for t in model.state_dict().values()}
    of_model = [s.path.startswith("model.") for s in state.specs(snap.skeleton)]
    assert [p.data_ptr() in live for p in places] == of_model
    for place, tensor in zip(places, snap.tensors, strict=True):
        state.as_bytes(place)[:] = state.as_bytes(state.to_wire(tensor))
    state.load(b, snap.skeleton, places)
    assert state.digest(a) == state.digest(b)
    # The second time the optimizer's state is live too.
    again = state.landing(b, state.snapshot(a).skeleton, "cpu")
    assert ours.state[model[0].weight]["exp_avg"].data_ptr() in {p.data_ptr() for p in again}


@pytest.mark.parametrize("shared", ["whole", "partly", "as donor"])
def test_receiving_never_lands_two_tensors_in_one_memory(shared: str) -> None:
    ours = torch.zeros(6)
    second = {"whole": ours, "partly": ours[2:], "as donor": ours}[shared]
    theirs = torch.arange(6.0)
    other = theirs if shared == "as donor" else torch.ones(len(second))
    a = {"a": Box({"x": theirs}), "b": Box({"y": other})}
    b = {"a": Box({"x": ours}), "b": Box({"y": second})}
    snap = state.snapshot(a)
    places = state.landing(b, snap.skeleton, "cpu")
    assert len({p.data_ptr() for p in places}) == len(places)
    for place, tensor in zip(places, snap.tensors, strict=True):
        place.copy_(tensor)
    state.load(b, snap.skeleton, places)
    assert state.digest(a) == state.digest(b)


def test_objects_that_keep_the_state_dict_they_are_given_do_not_meet_in_it() -> None:
    class Greedy(Box):
        def load_state_dict(self, value: Any) -> None:
            self.value = value
            value["extra"] = 1

    shared = {"t": torch.zeros(2), "list": [1]}
    b = {"p": Greedy(), "q": Greedy()}
    give({"p": Box(dict(shared)), "q": Box(dict(shared))}, b)
    b["p"].value["list"].append(2)
    b["p"].value["t"].add_(1)
    assert b["q"].value["list"] == [1] and b["q"].value["t"].tolist() == [0, 0]


# ------------------------------------------------------------------ digests and bytes


def test_a_digest_ignores_what_two_equal_states_may_differ_in() -> None:
    t = torch.arange(4.0)
    a = {"x": Box({"a": 1, "b": t, "c": t}), "y": Box(OrderedDict(k=[1]))}
    b = {"y": Box(defaultdict(list, k=[1])), "x": Box({"c": t.clone(), "b": nn.Parameter(t.clone()), "a": 1})}
    assert state.digest(a) == state.digest(b)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_flipped_bit_changes_digest_and_fingerprint(data: st.DataObject) -> None:
    objs = {"m": nn.Linear(3, 2), "b": Box({"n": torch.zeros(3, dtype=torch.bfloat16)})}
    before = state.digest(objs), state.fingerprint(state.snapshot(objs))
    tensor = data.draw(st.sampled_from(state.snapshot(objs).tensors))
    raw = state.as_bytes(tensor)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert state.digest(objs) != before[0]
    assert state.fingerprint(state.snapshot(objs)) != before[1]


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ("a", b"a"), ({1: 2}, {"1": 2}), ({}, []),
     (np.float32(1), np.float64(1)), (torch.zeros(2), torch.zeros(2, 1)),
     (torch.zeros(1), torch.zeros(1, dtype=torch.int32))],
)  # fmt: skip
def test_values_of_different_kinds_have_different_digests(a: Any, b: Any) -> None:
    assert state.digest({"x": Box(a)}) != state.digest({"x": Box(b)})


def test_bytes_are_the_tensors_own_memory_also_of_one_that_needs_gradients() -> None:
    p = nn.Parameter(torch.zeros(3))
    view = state.as_bytes(p)
    view[:4] = struct.pack("<f", 2.5)
    assert p.tolist() == [2.5, 0, 0] and p.requires_grad
    assert state.to_wire(p).data_ptr() == p.data_ptr()
    assert state.as_bytes(torch.tensor(1, dtype=torch.int16)).nbytes == 2
    assert state.as_bytes(torch.empty(0, 4)).nbytes == 0


def test_strided_and_conjugated_tensors_pass_through_a_copy() -> None:
    t = torch.arange(6.0).reshape(2, 3).t()
    with pytest.raises(ValueError, match="to_wire"):
        state.as_bytes(t)
    assert torch.equal(state.from_wire(state.to_wire(t + 1), t), torch.arange(6.0).reshape(2, 3).t() + 1)
    assert torch.equal(through(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))
    assert torch.equal(through(torch.ones(1).expand(3)), torch.ones(3))
