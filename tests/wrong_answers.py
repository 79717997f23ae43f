"""Typical wrong answers to the exercises, and what the learner is told.

WRONG = {notebook's stem: {exercise's number: [(answer, part of the error), ...]}}

answer  source text that takes the place of the solution: all of the solution's cell but its last statement, the check.
part    of "Type: message" of the error that ends the check. It names the mistake, so no word of chance ("assert", "is
        wrong") will do.

Each exercise has one at least. tests/mutate.py executes them after the notebook, tests/test_exercises.py compares.
"""


def run_padded(fill, returned):
    """An answer to 06's exercise on padding, with the line that fills the padded request ("": none) and the result."""
    filled = f"    {fill}\n" if fill else ""
    return (
        "def run_padded(pool, a, w, bias):\n"
        "    rows, k = a.shape[1:]\n"
        "    padded = a.new_zeros(1, pool.bucket((rows,))[0], k)\n"
        f"{filled}"
        "    y = a.new_empty(1, padded.shape[1], w.shape[2])\n"
        "    pool.get((rows,)).run({'A': padded, 'W': w, 'bias': bias, 'Y': y})\n"
        f"    return {returned}"
    )


WRONG = {
    "00_five_steps": {
        1: [
            ("prediction = 40", "which row and column lie at offset 40"),
            ("prediction = 1", "row 1 starts at offset 40, as described"),
        ],
        2: [
            (
                "def describe_transposed(g):\n    return describe(g, b_t, 'B')",
                "dims (1, 40, 72) are those of b_t",
            ),
            (
                "def describe_transposed(g):\n    return describe(g, b_t.transpose(1, 2).contiguous(), 'B')",
                "rows of B contiguous, as after a copy",
            ),
            (
                "def describe_transposed(g):\n    return g.tensor(name='B', dim=[1, 72, 40], stride=[2880, 72, 1])",
                "swap them as the dims are swapped",
            ),
        ],
        3: [
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    return Z, g.relu(Z).set_output(True)",
                "it has no memory: call .set_output(True)",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True)\n"
                "    return g.relu(Z).set_output(True), Z",
                "Z is the value after the ReLU",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.matmul(A, B).set_output(True)\n"
                "    return Z, g.relu(g.bias(Z, V)).set_output(True)",
                "Z is the matrix product alone",
            ),
        ],
    },
    "01_fused_conv_bias_relu": {
        1: [
            ("prediction = (8, 7)", "rounded up"),
            ("prediction = (8, 6)", "the dilation is ignored"),
            ("prediction = (6, 6)", "the padding counts once"),
        ],
        2: [
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.sigmoid(g.bias(conv, B))",
                "sigmoid(v) alone",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.bias(g.swish(conv), B)",
                "the activation comes before the bias",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[0, 0], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.swish(g.bias(conv, B))",
                "needs padding=[1, 1]",
            ),
        ],
        3: [
            (
                "def residual_graph(g, X, W, B, S):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.add(g.relu(g.bias(conv, B)), S)",
                "S is added after the ReLU",
            ),
            (
                "def residual_graph(g, X, W, B, S):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.add(g.bias(conv, B), S)",
                "the ReLU is missing",
            ),
            (
                "def residual_graph(g, X, W, B, S):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.relu(g.add(conv, S))",
                "the bias is missing",
            ),
        ],
        4: [
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 3 * y) / (x + w + y)",
                "four more passes, not two",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * hw**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "Y has fewer rows than X where the stride is 2",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = c * hw**2, k * c * r**2, k * out**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "hold 32 images each",
            ),
        ],
    },
    "02_autotuning": {
        1: [
            ("prediction = 2", "of a tie the best ranked wins"),
            ("prediction = 0", "more than a tie allows"),
        ],
        2: [
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return int(tuning_ms / gain) if gain > 0 else float('inf')",
                "rounded down",
            ),
            (
                "import math\n\n\n"
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    return math.ceil(tuning_ms / (first_ms - tuned_ms))",
                "equal times are no gain",
            ),
            (
                "import math\n\n\n"
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return math.ceil(tuning_ms / gain) if gain else float('inf')",
                "a gain of -0.5 ms never pays",
            ),
        ],
        3: [
            (
                "def choice_within(tuning, limit):\n"
                "    return next(c for c in tuning.candidates if c.plan and c.plan.workspace_bytes < limit)",
                "a need of exactly the limit fits",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return min((c for c in tuning.candidates if c.plan), key=lambda c: c.plan.workspace_bytes)",
                "this is the smallest that fits",
            ),
            (
                "def choice_within(tuning, limit):\n    return tuning.first",
                "it needs more than the limit",
            ),
        ],
        4: [
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(make_graph(), json.loads(store[key]))",
                "it tunes in every call",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if not store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(make_graph(), json.loads(next(iter(store.values()))))",
                "the second key got the first one's winner",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(make_graph(), store[key])",
                "json.loads of what was stored",
            ),
        ],
    },
    "03_fp8_amax_epilogue": {
        1: [
            ("prediction = (0.3, 8)", "nothing is rounded or clipped"),
            ("prediction = (20, 448)", "multiply by the descale"),
            ("prediction = (0.3125, 8)", "512 is beyond 448"),
        ],
        2: [
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Y = g.relu(g.bias(g.matmul(A, B), V)).set_output(True)\n"
                "    return Y, amax_of(g, Y)",
                "this is the largest value, not magnitude",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    amax = g.reduction(Z, mode=cudnn.reduction_mode.AMAX).set_output(True)\n"
                "    amax.set_dim([1, 1, 1]).set_stride([1, 1, 1])\n"
                "    return g.relu(Z).set_output(True), amax",
                "amax is no fp32",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True).set_name('Z')\n"
                "    return g.relu(Z).set_output(True), amax_of(g, Z)",
                "['Z'] is an output, too",
            ),
        ],
        3: [
            (
                "def power_of_two_scale(amax, margin=0):\n    return 2.0 ** math.floor(math.log2(448 / amax))",
                "the margin is ignored",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n    return 2.0 ** math.frexp(448 / 2**margin / amax)[1]",
                "frexp gives one more",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n    return 448 / 2**margin / amax",
                "not a power of two",
            ),
        ],
        4: [
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 3 / bandwidth / (gain / peak)",
                "a multiply-add is two operations",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 2 / bandwidth / (gain * 2 / peak)",
                "3 bytes move per element",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 3 / bandwidth / ((1 + gain) * 2 / peak)",
                "gain is the second kernel over the matmul, not both",
            ),
        ],
    },
    "04_sdpa": {
        1: [
            ("prediction = (33, 50.5, 0)", "a corner of 64 × 128"),
            ("prediction = (31, 52.5, 0)", "row 39 sees 100 keys at most"),
            ("prediction = (31, 50.5, 64.5)", "row 63 is past the end"),
        ],
        2: [
            (
                "def window(width):\n    return {**causal(TOP_LEFT), 'diagonal_band_left_bound': width - 1}",
                "one key too few",
            ),
            (
                "def window(width):\n    return {'diagonal_alignment': TOP_LEFT, 'diagonal_band_left_bound': width}",
                "later keys are visible",
            ),
            (
                "def window(width):\n    return {**causal(BOTTOM_RIGHT), 'diagonal_band_left_bound': width}",
                "this is the bottom-right corner",
            ),
        ],
        3: [
            (
                "def kept(s_q, s_kv, corner):\n    return s_q * (s_q + 1) // 2",
                "bottom-right: this is the count of the other corner",
            ),
            (
                "def kept(s_q, s_kv, corner):\n    return s_q * s_kv // 2",
                "half of all scores",
            ),
            (
                "def kept(s_q, s_kv, corner):\n"
                "    more = s_kv - s_q if corner == BOTTOM_RIGHT else 0\n"
                "    return s_q * (s_q - 1) // 2 + s_q * more",
                "the diagonal is kept, too",
            ),
        ],
        4: [
            (
                "def merge(o1, l1, o2, l2):\n    return (o1 + o2) / 2",
                "this is the plain mean",
            ),
            (
                "def merge(o1, l1, o2, l2):\n    return l1.exp() * o1 + l2.exp() * o2",
                "divide by their sum",
            ),
            (
                "def merge(o1, l1, o2, l2):\n    return torch.sigmoid(l2 - l1) * o1 + torch.sigmoid(l1 - l2) * o2",
                "the weights are swapped",
            ),
        ],
    },
    "05_plan_serialization": {
        1: [
            (
                "def is_whole(data):\n"
                "    if len(data) < 48:\n"
                "        return False\n"
                "    magic, length, _ = struct.unpack('<8sQ32s', data[:48])\n"
                "    return magic == b'cudnnpln' and length == len(data) - 48",
                "compare the sha256 as well",
            ),
            (
                "def is_whole(data):\n"
                "    return len(data) > 48 and struct.unpack('<Q', data[8:16])[0] == len(data) - 48",
                "what of magic and sha256",
            ),
            (
                "def is_whole(data):\n    return len(data) > 48 and hashlib.sha256(data[48:]).digest() == data[16:48]",
                "compare the magic, cudnnpln",
            ),
            (
                "def is_whole(data):\n    return len(data) > 48 and hashlib.sha256(data).digest() == data[16:48]",
                "are of what follows the prefix",
            ),
            (
                "def is_whole(data):\n"
                "    magic, length, sha256 = struct.unpack('<8sQ32s', data[:48])\n"
                "    return length == len(data) - 48 and hashlib.sha256(data[48:]).digest() == sha256",
                "unpack requires a buffer of 48 bytes",
            ),
        ],
        2: [
            (
                "def native_bytes(path):\n"
                "    return sum(len(kernel['cubin']) for kernel in kernels_of(parts(path)[1]))",
                "characters of base64, four for three bytes",
            ),
            (
                "def native_bytes(path):\n    return len(parts(path)[1])",
                "the whole blob, of which the kernels are a part",
            ),
            (
                "def native_bytes(path):\n    return len(kernels_of(parts(path)[1]))",
                "the number of kernels, not of their bytes",
            ),
        ],
        3: [
            (
                "def stock(store, graphs):\n    for graph in graphs:\n        store.get(graph)\n    return len(graphs)",
                "every graph is counted",
            ),
            (
                "def stock(store, graphs):\n    return sum(store.load(graph())[0] is None for graph in graphs)",
                "`load` never builds",
            ),
            (
                "def stock(store, graphs):\n"
                "    loaded = 0\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "        loaded += store.reason.startswith('loaded')\n"
                "    return loaded",
                "those that were loaded are counted",
            ),
            (
                "def stock(store, graphs):\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "    return int(store.reason.startswith('built'))",
                "only the last graph is counted",
            ),
        ],
    },
    "06_dynamic_shapes": {
        1: [
            (
                "def count_kernels(pairs):\n    return len(set(pairs))",
                "pairs of the same two classes share a kernel",
            ),
            (
                "def count_kernels(pairs):\n    return len({(k & -k, n & -n) for k, n in pairs})",
                "16 is no class of its own",
            ),
            (
                "def count_kernels(pairs):\n    return len({(k % 8 == 0, n % 8 == 0) for k, n in pairs})",
                "that is too coarse: 4, 2 and 1 differ",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(k & -k, 8) for k, n in pairs})",
                "N counts as well",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(n & -n, 8) for k, n in pairs})",
                "K counts as well",
            ),
            (
                "def count_kernels(pairs):\n"
                "    return len({tuple(sorted((min(k & -k, 8), min(n & -n, 8)))) for k, n in pairs})",
                "(K, N) and (N, K) are different kernels",
            ),
        ],
        2: [
            (
                "def buckets_within(share, largest=8192):\n    return [2**i for i in range(14)]",
                "a bucket of 4 wastes more than 0.25 of a request of 3",
            ),
            (
                "import math\n\n\n"
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], 1\n"
                "    while rows <= largest:\n"
                "        found.append(min(largest, math.ceil(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "a bucket of 2 wastes more than 0.25 of a request of 1",
            ),
            (
                "def buckets_within(share, largest=8192):\n    return list(range(1, largest + 1))",
                "35 are enough: the next follows from the rows not served yet",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found = [1]\n"
                "    while found[-1] < largest:\n"
                "        found.append(min(largest, max(found[-1] + 1, int(found[-1] * (1 + share)))))\n"
                "    return found",
                "the next follows from the rows not served yet",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], 1\n"
                "    while rows * (1 + share) <= largest:\n"
                "        found.append(int(rows * (1 + share)))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "no bucket holds 8192 rows: the last is",
            ),
        ],
        3: [
            (
                run_padded("padded[:, :rows] = a", "y"),
                "64 rows for a request of 50: cut the padding off",
            ),
            (
                run_padded("", "y[:, :rows]"),
                "the plan saw zeros only",
            ),
            (
                run_padded("padded[:, -rows:] = a", "y[:, :rows]"),
                "the request is in the last rows, and the first were returned",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, -rows:]"),
                "the request is in the first rows, and the last were returned",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    rows = a.shape[1]\n"
                "    y = a.new_empty(1, rows, w.shape[2])\n"
                "    build(linear(rows)).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y",
                "the pool built nothing: take its plan",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    y = a.new_empty(1, a.shape[1], w.shape[2])\n"
                "    pool.get((a.shape[1],)).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y",
                "(1, 64, 768)",
            ),
        ],
    },
    "07_cuda_graphs": {
        1: [
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    graph = graphs.setdefault('only', None) or capture(work, inputs)\n"
                "    graphs['only'] = graph\n"
                "    return graph(**inputs)",
                "capture again for that",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = inputs['x'].shape\n"
                "    if key not in graphs:\n"
                "        graphs[key] = capture(work, inputs)\n"
                "    if len(graphs) > limit:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    return graphs[key](**inputs)",
                "it dropped the oldest, which was used since",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = inputs['x'].shape\n"
                "    graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    graphs[key] = graph\n"
                "    return graph(**inputs)",
                "it kept more than `limit` graphs",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = inputs['x'].shape\n"
                "    graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    graphs[key] = graph\n"
                "    if len(graphs) > limit:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    graph.replay()\n"
                "    return graph.outputs",
                "an earlier result",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = inputs['x'].shape\n"
                "    graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    graphs[key] = graph\n"
                "    if len(graphs) >= limit:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    return graph(**inputs)",
                "it dropped a graph too early",
            ),
        ],
        2: [
            (
                "def all_outputs(captured, inputs):\n    return [captured(x=x) for x in inputs]",
                "one tensor of the graph: clone it",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured().clone() for x in inputs]",
                "the graph never saw the inputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return captured(x=torch.stack(inputs))",
                "capture again for that",
            ),
        ],
        3: [
            (
                "def run_rows(captured, x):\n    return captured(x=x).clone()",
                "capture again for that",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    return captured.outputs[:, : x.shape[1]].clone()",
                "this is the output of before: write, then replay",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs.clone()",
                "32 rows for a request of 20: cut them off",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1]]",
                "the next request overwrote an earlier result: clone it",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, -x.shape[1] :].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1]].clone()",
                "are x and the result in the same rows",
            ),
        ],
    },
    "08_hot_path": {
        1: [
            (
                "def hot_lengths(log, share):\n"
                "    chosen, reached = [], 0\n"
                "    for tokens, count in Counter(log).most_common():\n"
                "        chosen.append(tokens)\n"
                "        reached += count\n"
                "        if reached > share * len(log):\n"
                "            break\n"
                "    return chosen",
                "one length more than needed",
            ),
            (
                "def hot_lengths(log, share):\n"
                "    ranked = [tokens for tokens, _ in Counter(log).most_common()]\n"
                "    return ranked[: round(share * len(ranked))]",
                "it is the requests that count",
            ),
            (
                "def hot_lengths(log, share):\n    return [tokens for tokens, _ in Counter(log).most_common(3)]",
                "three, whatever the share",
            ),
            (
                "def hot_lengths(log, share):\n"
                "    chosen, reached = [], 0\n"
                "    for tokens, count in Counter(log).most_common():\n"
                "        reached += count\n"
                "        if reached >= share * len(log):\n"
                "            break\n"
                "        chosen.append(tokens)\n"
                "    return chosen",
                "one length too few",
            ),
            (
                "def hot_lengths(log, share):\n"
                "    chosen, reached = [], 0\n"
                "    for tokens, count in Counter(log).most_common():\n"
                "        if reached >= share * len(log):\n"
                "            break\n"
                "        chosen.append(tokens)\n"
                "        reached += count\n"
                "    return sorted(chosen)",
                "the most frequent come first",
            ),
        ],
        2: [
            (
                "def padding(log, hot, buckets):\n"
                "    rows = [m if m in hot else min(b for b in buckets if b >= m) for m in log]\n"
                "    return (sum(rows) - sum(log)) / sum(log)",
                "not over the computed ones",
            ),
            (
                "def padding(log, hot, buckets):\n"
                "    rows = [min(b for b in buckets if b >= m) for m in log]\n"
                "    return 1 - sum(log) / sum(rows)",
                "the hot lengths are not padded",
            ),
            (
                "def padding(log, hot, buckets):\n"
                "    tail = [m for m in log if m not in hot]\n"
                "    rows = [min(b for b in buckets if b >= m) for m in tail]\n"
                "    return 1 - sum(tail) / sum(rows) if rows else 0.0",
                "those of the hot lengths too",
            ),
            (
                "def padding(log, hot, buckets):\n"
                "    rows = [m if m in hot else min(b for b in buckets if b >= m) for m in log]\n"
                "    return sum(log) / sum(rows)",
                "the share of rows that were asked for",
            ),
        ],
        3: [
            (
                "def answer_together(service, requests):\n    return [service(x) for x in requests]",
                "3 launches for three requests",
            ),
            (
                "def answer_together(service, requests):\n"
                "    bound = service.bound\n"
                "    for x in requests:\n"
                "        bound.x[:, : x.shape[1]].copy_(x)\n"
                "    bound.launcher(service.rows(sum(x.shape[1] for x in requests)))()\n"
                "    return [bound.y[:, : x.shape[1]].clone() for x in requests]",
                "written to the same rows",
            ),
            (
                "def answer_together(service, requests):\n"
                "    sizes, bound = [x.shape[1] for x in requests], service.bound\n"
                "    bound.x[:, : sum(sizes)].copy_(torch.cat(requests, dim=1))\n"
                "    bound.launcher(service.rows(sum(sizes)))()\n"
                "    return list(bound.y[:, : sum(sizes)].split(sizes, dim=1))",
                "the answers lie in the service's buffer",
            ),
            (
                "def answer_together(service, requests):\n"
                "    sizes, bound = [x.shape[1] for x in requests], service.bound\n"
                "    bound.x[:, : sum(sizes)].copy_(torch.cat(requests, dim=1))\n"
                "    bound.launcher(sizes[0])()\n"
                "    return [y.clone() for y in bound.y[:, : sum(sizes)].split(sizes, dim=1)]",
                "launched for 61 rows, but there are 176",
            ),
            (
                "def answer_together(service, requests):\n    return service(torch.cat(requests, dim=1)).clone()",
                "not one answer per request",
            ),
        ],
    },
}
