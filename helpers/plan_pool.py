"""Plans of one computation for a stream of shapes: bounded in number, by buckets, with compiled kernels shared."""

import gc
import json
import operator
import time

import cudnn

from .graph import GraphError, build
from .target import target

# Compiling a kernel takes 70 to 900 ms, or 27 to 60 ms where CUDA's compute cache on disk has its code; finding one in
# cuDNN's kernel cache takes at most 3 ms, and 15 ms for a plan that is built by name (seen for matmuls and convolutions
# with cuDNN 9.19 to 9.28). Without a GPU there is no compute cache, and finding took up to 60 ms on a busy machine.
COMPILE_MS = 20 if target.live else 70
COMPILES = cudnn.behavior_note.RUNTIME_COMPILATION


class PlanPool:
    """Plans of one computation by shape; the least recently used goes where there would be more than `limit`.

    make_graph  function (shape, **options) that returns a described graph for tensors of this shape and passes the
                options on to new_graph; static plans have no options.
    bucket      function shape -> the shape to build for, as long and no smaller in any place; default: the shape
                itself. The caller pads to it.
    limit       the most plans that are kept.
    dynamic     True: plans have dynamic shapes and share one kernel cache. A shape for which cuDNN refuses this gets a
                static plan, and where the first one is refused (always below SM80), so do all. False: static plans.
    pin         False: the heuristics choose engine and knobs for each shape, and each choice that they make compiles.
                True: dynamic plans after the first one are built with its engine and knobs, so that no later shape
                compiles unless its alignment differs; what is fast for the first shape may be slow for others.

    cache       the cudnn kernel cache that the plans share; None where they are static.
    why_static  why plans are static, in one line; "" where they are not.
    hits, builds, evictions  counts: shapes that found their plan, plans built, plans dropped.
    compiled    of the builds, those that compiled a kernel: with an engine that compiles at run time, the last of the
                five steps took more than COMPILE_MS, of processor time too. (For the cache's own count see `kernels`.)
    build_ms    milliseconds spent in all builds, describing included.

    For one thread, or under a lock of the caller's.
    """

    def __init__(self, make_graph, bucket=None, limit=64, dynamic=True, pin=False):
        if operator.index(limit) < 1:
            raise ValueError(f"limit is {limit}: at least one plan has to be kept")
        self.make_graph, self.limit, self.pin = make_graph, operator.index(limit), pin
        self._bucket, self._plans, self._pinned = bucket or tuple, {}, None
        self.cache = cudnn.create_kernel_cache() if dynamic else None
        self.why_static = "" if dynamic else "asked for"
        self.hits = self.builds = self.evictions = self.compiled = 0
        self.build_ms = 0.0

    @property
    def _options(self):
        """What a graph with dynamic shapes is made with."""
        return {"is_dynamic_shape_enabled": True, "kernel_cache": self.cache}

    def bucket(self, shape):
        """The shape that the plan for `shape` is built for, a tuple of ints.

        Raises ValueError for a smaller one, TypeError where one of them is no sequence of ints.
        """
        shape = _ints("a shape", shape)
        place = _ints(f"bucket({shape})", self._bucket(shape))
        if len(place) != len(shape) or any(have < need for have, need in zip(place, shape, strict=True)):
            raise ValueError(f"bucket({shape}) is {place}: it has to be as long, and no smaller in any place")
        return place

    def get(self, shape):
        """The Plan for bucket(shape): kept, or built now. Raises what `make_graph` and `build` raise."""
        place = self.bucket(shape)
        plan = self._plans.pop(place, None)
        if plan is None:
            plan = self._build(place)
            while len(self._plans) >= self.limit:
                del self._plans[next(iter(self._plans))]
                self.evictions += 1
        else:
            self.hits += 1
        self._plans[place] = plan  # last, the place of the most recently used
        return plan

    def __len__(self):
        return len(self._plans)

    def __contains__(self, shape):
        return self.bucket(shape) in self._plans

    def __str__(self):
        kind = f"static ({self.why_static})" if self.why_static else "dynamic, one kernel cache"
        return (
            f"{len(self)} plans of at most {self.limit}, {kind}: {self.hits} hits, {self.builds} builds in "
            f"{self.build_ms:.0f} ms, {self.compiled} of them compiled, {self.evictions} evictions"
        )

    def _build(self, place):
        collects = gc.isenabled()
        gc.disable()  # as timeit does: a garbage collection can take as long as a compilation
        started, processor = time.perf_counter(), time.process_time()
        try:
            plan = self._built(place)
        finally:
            if collects:
                gc.enable()
        # A busy machine may keep a short step waiting, so the clock alone doesn't tell.
        took = min(plan.steps[-1].ms, (time.process_time() - processor) * 1e3)
        self.compiled += COMPILES in plan.notes and took > COMPILE_MS
        self.build_ms += (time.perf_counter() - started) * 1e3
        self.builds += 1
        return plan

    def _built(self, place):
        if not self.cache:
            return build(self.make_graph(place))
        try:
            return self._dynamic(place)
        except GraphError as refused:
            plan = build(self.make_graph(place))  # where this fails as well, dynamic shapes are not to blame
            if not self.builds:
                why = refused.reason.splitlines()[0].partition(" (")[0]  # cuDNN's details for each engine follow
                self.cache, self.why_static = None, f"dynamic shapes are refused: {why}"
            return plan

    def _dynamic(self, place):
        """A plan with dynamic shapes; pinned, of the first one's engine and knobs where this shape has them."""
        if self._pinned:
            try:
                return build(self._described(place), choice=self._pinned)
            except GraphError:
                pass
        plan = build(self._described(place))
        if self.pin:
            self._pinned = self._pinned or plan.graph.get_engine_and_knobs_at_index(plan.graph._plan_index)
        return plan

    def _described(self, place):
        """The graph with dynamic shapes. Raises ValueError for one without: its plan would not share kernels."""
        graph = self.make_graph(place, **self._options)
        used = getattr(graph, "_cpp_graph_kwargs", self._options)  # what is no graph at all, build says
        ignored = [name for name, value in self._options.items() if used.get(name) is not value]
        if ignored:
            raise ValueError(
                f"make_graph({place}, **options) ignores {' and '.join(ignored)}: pass its options on to new_graph, or "
                "ask for static plans with dynamic=False"
            )
        return graph


def _ints(name, values):
    """`values` as a tuple of ints. Raises TypeError for anything else: such keys would never be found again."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} is a sequence of ints, got {values!r}") from None


def kernels(cache):
    """How many compiled kernels a cudnn kernel cache counts.

    From cuDNN 9.27 on it is the cache's own `size`. Before, it is the number of entries of its JSON, and then only the
    first look tells: what the first `serialize` returned, each later one returns again, whatever was compiled since
    (seen with 9.19 and 9.24). So count once, at the end, and before that keep no JSON that shall be complete.
    """
    try:
        return cache.size()
    except RuntimeError:  # "only available starting 9.27"
        pass
    try:
        return len(json.loads(cache.serialize())["kernel_cache"])
    except RuntimeError:  # "descriptor not initialized": no graph was lowered with it yet
        return 0
