"""PlanPool: plans for a stream of shapes, bounded, with shared kernels; and what a kernel cache counts."""

import gc
import itertools
import random

import cudnn
import pytest
import torch

from helpers import GraphError, PlanPool, build, describe, kernels, new_graph, target

needs_sm80 = pytest.mark.skipif(bool(target.lacks("sm80")), reason=target.lacks("sm80"))
OUT = 40  # features of the output
SHAPES = [(2, 19, 24), (3, 7, 24), (1, 64, 24), (5, 100, 24)]


def linear(shape, **options):
    """swish(x W + bias) for x of shape (batch, tokens, features), the tokens of all sequences as rows of one matrix."""
    batch, tokens, features = shape
    on = {"device": target.device, "dtype": target.dtype}
    graph = new_graph("linear", **options)
    X = describe(graph, torch.empty(1, batch * tokens, features, **on), "X")
    W = describe(graph, torch.empty(1, OUT, features, **on).mT, "W")
    bias = describe(graph, torch.empty(OUT, **on), "bias")
    graph.swish(graph.bias(graph.matmul(X, W), bias)).set_output(True).set_name("Y")
    return graph


def is_right(plan, shape):
    """Runs the plan on random data and compares with PyTorch in fp32."""
    generator, (batch, tokens, features) = torch.Generator().manual_seed(0), shape
    x, w, bias = (
        torch.randn(*dims, generator=generator).to(target.device, target.dtype)
        for dims in ((1, batch * tokens, features), (1, OUT, features), (OUT,))
    )
    y = torch.full((1, batch * tokens, OUT), float("nan"), device=target.device, dtype=target.dtype)
    plan.run({"X": x, "W": w.mT, "bias": bias, "Y": y})
    z = (x.double() @ w.double().mT + bias.double()).float()
    return torch.allclose(y.float(), z * z.sigmoid(), rtol=4e-3, atol=1e-3 * features**0.5)


def up(step):
    """A bucket: the number of tokens rounded up to a multiple of `step`."""
    return lambda shape: (shape[0], -(-shape[1] // step) * step, shape[2])


class Built:
    """Stands for `build` in tests that only count: makes nothing, and remembers what it was asked for."""

    def __init__(self, monkeypatch, module, ms=0.0, notes=(cudnn.behavior_note.RUNTIME_COMPILATION,)):
        self.asked, self.ms, self.notes = [], ms, notes
        monkeypatch.setattr(module("plan_pool"), "build", self)

    def __call__(self, graph, choice=None):
        self.asked.append((graph, choice))
        return type("Built", (), {"notes": self.notes, "steps": [type("Step", (), {"ms": self.ms})]})()


# --- plans of cuDNN ---------------------------------------------------------------------------------------------------


@needs_sm80
def test_shapes_share_a_kernel():
    """Every shape gets a plan of its own, and only the first one compiles; all of them are right."""
    pool = PlanPool(linear, pin=True)
    for shape in SHAPES:
        assert is_right(pool.get(shape), shape)
    assert (pool.builds, pool.compiled, pool.hits, pool.evictions, len(pool)) == (4, 1, 0, 0, 4)
    assert kernels(pool.cache) == 1
    assert len({pool.get(shape).name for shape in SHAPES}) == 1
    assert pool.hits == 4
    assert "4 plans of at most 64, dynamic, one kernel cache: 4 hits, 4 builds in " in str(pool)


@needs_sm80
def test_an_odd_size_compiles_once():
    """Rows of 25 elements can't be read 16 bytes at a time: another kernel, which the next odd size shares."""
    pool, found = PlanPool(linear, pin=True), []
    for features in (24, 25, 27, 32):
        shape = (2, 19, features)
        assert is_right(pool.get(shape), shape)
        found.append(pool.compiled)
    assert found == [1, 2, 2, 2]


@needs_sm80
def test_kernels_are_as_many_as_choices():
    """The heuristics choose for each shape, and each of their choices compiles once."""
    pool, names, compiled = PlanPool(linear), [], []
    for shape in SHAPES:
        plan = pool.get(shape)
        assert is_right(plan, shape)
        assert plan.steps[2].name == "create_execution_plans"
        names.append(plan.name)
        compiled.append(pool.compiled)
    assert compiled == [len(set(names[:count])) for count in range(1, len(names) + 1)]
    assert kernels(pool.cache) == len(set(names))


@needs_sm80
def test_the_first_choice_is_pinned():
    """On demand, the heuristics are asked for the first shape only."""
    pool = PlanPool(linear, pin=True)
    steps = [pool.get(shape).steps[2].name for shape in SHAPES[:3]]
    assert steps == ["create_execution_plans", "create_execution_plan", "create_execution_plan"]


@needs_sm80
def test_a_choice_that_is_refused_is_no_end():
    """Where the pinned engine isn't there for a shape, the heuristics answer, and the pin stays."""
    pool = PlanPool(linear, pin=True)
    pool.get(SHAPES[0])
    pool._pinned = absent = (99999, {})
    plan = pool.get(SHAPES[1])
    assert plan.steps[2].name == "create_execution_plans"
    assert pool._pinned is absent
    assert is_right(plan, SHAPES[1])


def test_static_plans_where_they_are_asked_for():
    pool = PlanPool(linear, dynamic=False)
    assert (pool.cache, pool.why_static) == (None, "asked for")
    for shape in SHAPES[:2]:
        assert is_right(pool.get(shape), shape)
    assert pool.builds == 2
    assert "static (asked for)" in str(pool)


def test_static_plans_where_dynamic_shapes_are_refused():
    """As on a T4: the pool says why in one line, builds static plans, and doesn't ask again."""
    asked = []

    def refused(shape, **options):
        asked.append(options)
        graph = linear(shape, **options)
        if options:  # no engine has the tangent in double precision
            graph = new_graph("double", io=torch.float64, **options)
            a, b = (torch.empty(1, 16, 16, device=target.device, dtype=torch.float64) for _ in range(2))
            graph.tan(graph.matmul(describe(graph, a, "A"), describe(graph, b, "B"))).set_output(True)
        return graph

    pool = PlanPool(refused)
    for shape in SHAPES[:2]:
        assert is_right(pool.get(shape), shape)
    assert [bool(options) for options in asked] == [True, False, False]
    assert pool.cache is None
    assert pool.why_static.startswith("dynamic shapes are refused: ")
    assert "\n" not in pool.why_static
    assert pool.why_static in str(pool)


@pytest.mark.skipif(target.sm >= 80, reason="a target from SM80 on has dynamic shapes")
def test_capability_before_sm80():
    pool = PlanPool(linear)
    assert is_right(pool.get(SHAPES[0]), SHAPES[0])
    assert pool.why_static.startswith("dynamic shapes are refused: ")


def test_a_graph_that_is_wrong_stays_refused():
    """What builds neither way raises, and counts as nothing."""

    def wrong(shape, **options):
        graph = linear(shape, **options)
        graph.matmul(graph.tensor(dim=[1, 5, 7], stride=[35, 7, 1], name="A"), graph.tensor(dim=[1, 5, 7], name="B"))
        return graph

    pool = PlanPool(wrong)
    with pytest.raises((GraphError, ValueError)):
        pool.get(SHAPES[0])
    assert (pool.builds, len(pool)) == (0, 0)


# --- the policy -------------------------------------------------------------------------------------------------------


def pooled(**options):
    return PlanPool(lambda shape, **_: shape, dynamic=False, **options)


def test_the_least_recently_used_goes(monkeypatch, module):
    built, pool = Built(monkeypatch, module), pooled(limit=2)
    a, b, c = (1, 8), (2, 8), (3, 8)
    first = pool.get(a)
    pool.get(b)
    assert pool.get(a) is first  # b is now the one not used for longest
    pool.get(c)
    assert [shape in pool for shape in (a, b, c)] == [True, False, True]
    assert pool.get(a) is first
    pool.get(b)
    assert [graph for graph, _ in built.asked] == [a, b, c, b]
    assert (pool.hits, pool.builds, pool.evictions, len(pool)) == (2, 4, 2, 2)


def test_the_bound_holds(monkeypatch, module):
    """Five hundred random shapes: counts add up, and there are never more plans than the limit."""
    Built(monkeypatch, module)
    pool, random_ = pooled(limit=7), random.Random(1)
    for count in range(1, 501):
        pool.get((random_.randint(1, 4), random_.randint(1, 9)))
        assert len(pool) <= 7
        assert pool.hits + pool.builds == count
        assert pool.builds - pool.evictions == len(pool)


def test_buckets(monkeypatch, module):
    """Shapes of one bucket share a plan, which is built for the bucket's shape."""
    built, pool = Built(monkeypatch, module), pooled(bucket=up(16))
    assert pool.bucket([3, 17, 24]) == (3, 32, 24)
    plans = {pool.get((3, tokens, 24)) for tokens in (17, 25, 32)}
    assert len(plans) == 1
    assert [graph for graph, _ in built.asked] == [(3, 32, 24)]
    pool.get((3, 33, 24))
    assert (pool.hits, pool.builds) == (2, 2)


@pytest.mark.parametrize("place", [lambda s: (s[0], 16), lambda s: s[:1], lambda s: (*s, 1), lambda s: (s[0] - 1, 99)])
def test_a_bucket_that_does_not_hold_the_shape(monkeypatch, module, place):
    """A smaller one would let a plan read past the end of the data or leave some out."""
    built, pool = Built(monkeypatch, module), pooled(bucket=place)
    with pytest.raises(ValueError, match=r"bucket\(\(3, 17\)\) is .*: it has to be as long, and no smaller"):
        pool.get((3, 17))
    assert built.asked == []


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_keeps_nothing(limit):
    with pytest.raises(ValueError, match="at least one plan has to be kept"):
        PlanPool(linear, limit=limit)


@pytest.mark.parametrize(
    ("ms", "processor_ms", "notes", "compiled"),
    [
        (200.0, 180.0, (cudnn.behavior_note.RUNTIME_COMPILATION,), 2),
        (2.0, 180.0, (cudnn.behavior_note.RUNTIME_COMPILATION,), 0),  # found in a cache, after slow heuristics
        (200.0, 2.0, (cudnn.behavior_note.RUNTIME_COMPILATION,), 0),  # found in a cache, on a busy machine
        (27.0, 27.0, (cudnn.behavior_note.RUNTIME_COMPILATION,), 2),  # its code found in CUDA's compute cache
        (11.0, 11.0, (cudnn.behavior_note.RUNTIME_COMPILATION,), 0),  # found in a cache, by name
        (200.0, 180.0, (), 0),  # a ready kernel that was slow to load
    ],
)
def test_what_counts_as_compiled(monkeypatch, module, ms, processor_ms, notes, compiled):
    Built(monkeypatch, module, ms, notes)
    monkeypatch.setattr(module("plan_pool"), "COMPILE_MS", 20)  # as with a GPU
    clock = itertools.count(0, processor_ms / 1e3)
    monkeypatch.setattr(module("plan_pool").time, "process_time", lambda: next(clock))
    pool = pooled()
    pool.get((1, 2))
    pool.get((1, 3))
    assert pool.compiled == compiled


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_is_as_before(monkeypatch, module, on):
    """It waits while a plan is built, and goes on afterwards if it did before, also after a failure."""
    seen = []

    def failing(*_):
        seen.append(gc.isenabled())
        raise ValueError("no luck")

    monkeypatch.setattr(module("plan_pool"), "build", failing)
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(ValueError, match="no luck"):
            pooled().get((1, 2))
        assert (seen, gc.isenabled()) == ([False], on)
    finally:
        (gc.enable if before else gc.disable)()


def test_a_function_without_options_is_enough_for_static_plans():
    assert is_right(PlanPool(lambda shape: linear(shape), dynamic=False).get(SHAPES[0]), SHAPES[0])


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("made", "name"), [(None, "NoneType"), ((1, 2), "tuple")])
def test_a_function_that_returns_no_graph(dynamic, made, name):
    pool = PlanPool(lambda shape, **options: made, dynamic=dynamic)
    with pytest.raises(
        TypeError, match=rf"a described graph .* got {name}; does the function that describes it return it"
    ):
        pool.get(SHAPES[0])
    assert (pool.builds, len(pool)) == (0, 0)


@pytest.mark.parametrize(
    ("make_graph", "ignored"),
    [
        (lambda shape, **options: linear(shape), "is_dynamic_shape_enabled and kernel_cache"),
        (lambda shape, **options: linear(shape, is_dynamic_shape_enabled=True), "kernel_cache"),
        (
            lambda shape, **options: linear(shape, **options | {"kernel_cache": cudnn.create_kernel_cache()}),
            "kernel_cache",
        ),
    ],
)
def test_options_that_are_not_passed_on(make_graph, ignored):
    """Such plans would be static, or compile for every shape, while the pool counts on one kernel cache."""
    pool = PlanPool(make_graph)
    with pytest.raises(
        ValueError, match=rf"make_graph\(\(2, 19, 24\), \*\*options\) ignores {ignored}: pass its options"
    ):
        pool.get(SHAPES[0])
    assert pool.cache is not None and len(pool) == 0


# --- the kernel cache -------------------------------------------------------------------------------------------------


def test_kernels_of_a_cache_that_was_not_used():
    assert kernels(cudnn.create_kernel_cache()) == 0


@needs_sm80
def test_kernels_of_a_cache_after_builds():
    """Four plans, two alignments, two kernels; the first look is complete."""
    cache = cudnn.create_kernel_cache()
    for features in (24, 25, 27, 32):
        build(linear((2, 19, features), is_dynamic_shape_enabled=True, kernel_cache=cache))
    assert kernels(cache) == 2
    assert kernels(cache) == 2


class Counter:
    """A kernel cache with `size`, as from cuDNN 9.27 on, or without it."""

    def __init__(self, size=None, text='{"kernel_cache": [{}, {}, {}]}'):
        self._size, self._text = size, text

    def size(self):
        if self._size is None:
            raise RuntimeError("CUDNN_ATTR_KERNEL_CACHE_ENTRY_COUNT is only available starting 9.27.")
        return self._size

    def serialize(self):
        return self._text


def test_kernels_takes_the_caches_own_count():
    assert kernels(Counter(size=5)) == 5
    assert kernels(Counter()) == 3


def test_a_smaller_limit_is_kept_from_the_next_plan_on():
    pool = PlanPool(linear, limit=3, dynamic=False)
    for rows in (16, 17, 18):
        pool.get((1, rows, 24))
    pool.limit = 1
    pool.get((1, 19, 24))
    assert len(pool) == 1 and pool.evictions == 3


@pytest.mark.parametrize(("shape", "bucket"), [(10, None), ((1, 10.5, 24), None), ((1, 10, 24), lambda shape: 16)])
def test_a_shape_is_a_sequence_of_ints(shape, bucket):
    with pytest.raises(TypeError, match="is a sequence of ints, got"):
        PlanPool(linear, bucket=bucket).get(shape)


def test_tensors_of_one_int_find_their_plan_again():
    pool = PlanPool(linear, dynamic=False)
    plans = [pool.get(torch.tensor([1, 16, 24])) for _ in range(2)]
    assert plans[0] is plans[1] and pool.hits == 1


@pytest.mark.parametrize("limit", [1.5, None])
def test_a_limit_is_an_int(limit):
    with pytest.raises(TypeError):
        PlanPool(linear, limit=limit)
