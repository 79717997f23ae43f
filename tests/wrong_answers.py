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


def replay_by_shape(
    key="tuple((name, t.shape) for name, t in inputs.items())",
    graph="graphs[key] = graph = graphs.pop(key, None) or capture(work, inputs)",
    drop="del graphs[next(iter(graphs))]",
    returned="graph(**inputs)",
):
    """An answer to exercise 1 of 07: right, but for the parts that are given."""
    return (
        "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
        f"    key = {key}\n"
        f"    {graph}\n"
        "    if len(graphs) > limit:\n"
        f"        {drop}\n"
        f"    return {returned}"
    )


def together(
    rows="service.rows(sum(sizes))",
    call="()",
    fill="bound.x[:, : sum(sizes)].copy_(torch.cat(requests, dim=1))",
    answers="[y.clone() for y in bound.y[:, : sum(sizes)].split(sizes, dim=1)]",
):
    """An answer to 08's exercise on requests that share a launch, with parts of the solution replaced ("": none)."""
    filled = f"    {fill}\n" if fill else ""
    return (
        "def answer_together(service, requests):\n"
        "    sizes, bound = [x.shape[1] for x in requests], service.bound\n"
        f"{filled}"
        f"    bound.launcher({rows}){call}\n"
        f"    return {answers}"
    )


def hot_lengths(
    pairs="Counter(log).most_common()",
    each="tokens, count",
    enough="share * len(log)",
    choose="chosen.append(tokens)",
    reach="reached += count",
    end="\n    return chosen",
):
    """An answer to exercise 1 of 08: right, but for the parts that are given."""
    return (
        "def hot_lengths(log, share):\n"
        "    chosen, reached = [], 0\n"
        f"    for {each} in {pairs}:\n"
        f"        if reached >= {enough}:\n"
        "            break\n"
        f"        {choose}\n"
        f"        {reach}{end}"
    )


def padding(end, served="m if m in hot else min(b for b in buckets if b >= m)", requests="log"):
    """An answer to exercise 2 of 08: right with the end `return 1 - sum(log) / sum(rows)`, but for the other parts."""
    return f"def padding(log, hot, buckets):\n    rows = [{served} for m in {requests}]\n    {end}"


WRONG = {
    "00_five_steps": {
        1: [
            ("prediction = 40", "which row and column lie at offset 40"),
            ("prediction = 1", "row 1 starts at offset 40, as described"),
            ("prediction = (1, 0)", "(1, 0) is wrong"),
        ],
        2: [
            ("def describe_transposed(g):\n    return describe(g, b_t, 'B')", "dims (1, 40, 72) are those of b_t"),
            (
                "def describe_transposed(g):\n    return describe(g, b_t.transpose(1, 2).contiguous(), 'B')",
                "rows of B contiguous, as after a copy",
            ),
            (
                "def describe_transposed(g):\n    return g.tensor(name='B', dim=[1, 72, 40], stride=[2880, 72, 1])",
                "swap them as the dims are swapped",
            ),
            (
                "def describe_transposed(g):\n    return b_t.mT",
                "a tensor with dims (1, 72, 40) was returned: return the description",
            ),
            (
                "def describe_transposed(g):\n    return b_t.t",
                "a builtin_function_or_method was returned: return the description",
            ),
            (
                "def describe_transposed(g):\n    describe(g, b_t.mT, 'B')",
                "None was returned: is `return` missing? Return the description",
            ),
            ("def describe_transposed():\n    return b_t.mT", "keep the arguments that the stub has"),
            ("describe_transposed = b_t.mT", "define the function of the stub"),
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
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True)\n"
                "    return g.relu(Z).set_output(True)",
                "a Tensor was returned: return both, (Z, Y)",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True)\n"
                "    return (g.relu(Z).set_output(True),)",
                "a tuple of 1 was returned: return both, (Z, Y)",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True)\n"
                "    g.relu(Z).set_output(True)",
                "None was returned: is `return` missing? Return both, (Z, Y)",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Y = g.relu(g.bias(g.matmul(A, B), V)).set_output(True)\n"
                "    return Y, Y",
                "the same tensor twice",
            ),
            (
                "def two_outputs(g, A, B, V):\n    Z = g.bias(g.matmul(A, B), V).set_output(True)\n    return Z, Z",
                "the same tensor twice",
            ),
            (
                "def two_outputs(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V).set_output(True)\n"
                "    g.relu(Z).set_output(True)\n"
                "    return None, Z",
                "None was returned",
            ),
        ],
    },
    "01_fused_conv_bias_relu": {
        1: [
            ("prediction = (8, 7)", "rounded up"),
            ("prediction = (8, 6)", "the dilation is ignored"),
            ("prediction = (6, 6)", "the padding counts once"),
            ("prediction = (7, 5)", "a filter of 3 columns spans 3 with dilation 1"),
            ("prediction = (7, 7)", "along the columns it is 0"),
            ("prediction = (7, 9)", "along the columns it is 3"),
            ("prediction = (6, 5)", "the first position is missing"),
            ("prediction = (6, 7)", "the order is rows, then columns"),
            ("prediction = 7", "7 is wrong"),
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
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g, g.swish(g.bias(conv, B))",
                "a tuple of 2 was returned: return one tensor of the graph",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    g.swish(g.bias(conv, B))",
                "None was returned: is `return` missing? Return one tensor of the graph",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.relu(g.bias(conv, B))",
                "this is still ReLU",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.gelu(g.bias(conv, B))",
                "this is GELU",
            ),
            (
                "def silu_graph(g, X, W, B):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.swish(conv)",
                "the bias is missing",
            ),
            (
                "def silu_graph(g, X, W, B):\n    return F.silu(before)",
                "a tensor with dims (3, 40, 13, 19) was returned",
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
            (
                "def residual_graph(g, X, W, B, S):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    return g.relu(g.bias(conv, B))",
                "S is missing",
            ),
            (
                "def residual_graph(g, X, W, B, S):\n"
                "    conv = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])\n"
                "    g.relu(g.add(g.bias(conv, B), S))",
                "None was returned: is `return` missing? Return one tensor of the graph",
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
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = hw // s\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "only if padding makes up for the filter",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    if s == 2:\n"
                "        return\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "None was returned: is `return` missing? Return the ratio, a number, for ResNet-50 conv3 3×3/2",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    (x + w + 5 * y) / (x + w + y)",
                "None was returned: is `return` missing? Return the ratio, a number, for ResNet-50 conv2 1×1",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, 32 * k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "W is there once",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 5 * y) / (x + w + y)",
                "the padding counts twice",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + y) / (x + w + 5 * y)",
                "the other way round",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return (x + w + 4 * y) / (x + w + y)",
                "five passes in all",
            ),
            (
                "def traffic_ratio(c, hw, k, r, s, p):\n"
                "    out = (hw + 2 * p - r) // s + 1\n"
                "    x, w, y = 32 * c * hw**2, k * c * r**2, 32 * k * out**2\n"
                "    return x + w + 5 * y, x + w + y",
                "a tuple of 2 was returned: return the ratio, a number",
            ),
            ("traffic_ratio = 4.2", "define the function of the stub"),
        ],
    },
    "02_autotuning": {
        1: [
            ("prediction = 2", "of a tie the best ranked wins"),
            ("prediction = 0", "more than a tie allows"),
            ("prediction = 3", "rank 3 is the slowest"),
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
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    if gain > 0:\n"
                "        return -(-tuning_ms // gain)",
                "None was returned: is `return` missing? Return a number; here a call gains 0 ms",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    -(-tuning_ms // gain) if gain > 0 else float('inf')",
                "None was returned: is `return` missing? Return a number; here a call gains 0.5 ms",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return round(tuning_ms / gain + 0.5) if gain > 0 else float('inf')",
                "one call too many",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return tuning_ms // gain + 1 if gain > 0 else float('inf')",
                "one call too many",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n    return -(-tuning_ms // tuned_ms)",
                "divides by the tuned time",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n    return -(-tuning_ms // first_ms)",
                "divides by the time of a call",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return tuning_ms / gain if gain > 0 else float('inf')",
                "not rounded",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = tuned_ms - first_ms\n"
                "    return -(-tuning_ms // gain) if gain > 0 else float('inf')",
                "not the other way round",
            ),
            (
                "def break_even(tuning_ms, first_ms, tuned_ms):\n"
                "    gain = first_ms - tuned_ms\n"
                "    return -(-tuning_ms // gain) if gain > 0 else 'inf'",
                "a str was returned",
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
            ("def choice_within(tuning, limit):\n    return tuning.first", "it needs more than the limit"),
            (
                "def choice_within(tuning, limit):\n"
                "    return next((c for c in tuning.candidates if c.plan and c.plan.workspace_bytes < limit), None)",
                "a need of exactly the limit fits",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return [c for c in tuning.candidates if c.plan and c.plan.workspace_bytes < limit][0]",
                "a need of exactly the limit fits",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    fit = [c for c in tuning.candidates if c.plan and c.plan.workspace_bytes < limit]\n"
                "    return min(fit, key=lambda c: c.rank)",
                "a need of exactly the limit fits",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    next(c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit)",
                "None was returned: is `return` missing? Return the Candidate itself",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return next(c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit).plan",
                "a Plan was returned: return the Candidate itself",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return next(c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit).rank",
                "an int was returned: return the Candidate itself",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return next(c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit).name",
                "a str was returned: return the Candidate itself",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return [c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit]",
                "was returned: return the Candidate itself",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    return [c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit][-1]",
                "fits: take the best ranked",
            ),
            (
                "def choice_within(tuning, limit):\n"
                "    fit = [c for c in tuning.candidates if c.plan and c.plan.workspace_bytes <= limit]\n"
                "    return max(fit, key=lambda c: c.plan.workspace_bytes)",
                "this is the largest that fits",
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
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(make_graph(), json.loads(next(iter(store.values()))))",
                "another key got the first one's winner",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(make_graph, json.loads(store[key]))",
                "replay takes a graph: call make_graph()",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return replay(small_graph(), json.loads(store[key]))",
                "a plan of another graph",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    replay(make_graph(), json.loads(store[key]))",
                "None was returned: is `return` missing? Return the Plan that replay gives",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    else:\n"
                "        return replay(make_graph(), json.loads(store[key]))",
                "in the first call and in later ones",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors).winner)\n"
                "    return json.loads(store[key])",
                "was returned: return the Plan that replay gives",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(tune(make_graph, tensors))\n"
                "    return replay(make_graph(), json.loads(store[key]))",
                "the tuning's `winner`",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = tune(make_graph, tensors).winner\n"
                "    return replay(make_graph(), store[key])",
                "json.dumps",
            ),
            (
                "def tuned_plan(store, key, make_graph, tensors, tune=autotune):\n"
                "    if key not in store:\n"
                "        store[key] = json.dumps(autotune(make_graph, tensors, per_mode=1).winner)\n"
                "    return replay(make_graph(), json.loads(store[key]))",
                "`tune` was never called",
            ),
        ],
    },
    "03_fp8_amax_epilogue": {
        1: [
            ("prediction = (0.3, 8)", "nothing is rounded or clipped"),
            ("prediction = (20, 448)", "multiply by the descale"),
            ("prediction = (0.3125, 8)", "512 is beyond 448"),
            ("prediction = (0.3, 7)", "nothing is rounded here"),
            ("prediction = (19 / 64, 7)", "19 is no e4m3 number"),
            ("prediction = (18 / 64, 7)", "19.2 is nearer to 20"),
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
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    return amax_of(g, Z), g.relu(Z).set_output(True)",
                "the order is (Y, amax)",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    g.relu(Z).set_output(True)\n"
                "    return amax_of(g, Z)",
                "a Tensor was returned: return both, (Y, amax)",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    return g.relu(Z).set_output(True), Z, amax_of(g, Z)",
                "a tuple of 3 was returned: return both, (Y, amax)",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    g.relu(Z).set_output(True), amax_of(g, Z)",
                "None was returned: is `return` missing? Return both, (Y, amax)",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    amax_of(g, Z)\n"
                "    return g.relu(Z).set_output(True), None",
                "None was returned",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    P = g.matmul(A, B)\n"
                "    return g.relu(g.bias(P, V)).set_output(True), amax_of(g, P)",
                "this is the amax of A @ B",
            ),
            (
                "def amax_before_relu(g, A, B, V):\n"
                "    Z = g.bias(g.matmul(A, B), V)\n"
                "    return Z.set_output(True), amax_of(g, Z)",
                "Y is the value before the ReLU",
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
            ("def power_of_two_scale(amax, margin=0):\n    return 448 / 2**margin / amax", "not a power of two"),
            (
                "def power_of_two_scale(amax, margin=0):\n"
                "    limit = 448 / (2 * margin) if margin else 448\n"
                "    return 2.0 ** math.floor(math.log2(limit / amax))",
                "not 448 / (2 * margin)",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n"
                "    return 2.0 ** math.floor(math.log2(448 / (2 * margin) / amax))",
                "a division by 0: the limit is 448 / 2**margin",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n    return math.floor(math.log2(448 / 2**margin / amax))",
                "this is the exponent",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n"
                "    return 2.0 ** math.floor(math.log2(448 * 2**margin / amax))",
                "the margin goes the wrong way",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n"
                "    return 2.0 ** (math.ceil(math.log2(448 / 2**margin / amax)) - 1)",
                "look at an exact power of two",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n    2.0 ** math.floor(math.log2(448 / 2**margin / amax))",
                "None was returned: is `return` missing? Return a number for amax=448, margin=0",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n"
                "    if not margin:\n"
                "        return 2.0 ** math.floor(math.log2(448 / amax))",
                "None was returned: is `return` missing? Return a number for amax=1, margin=2",
            ),
            (
                "def power_of_two_scale(amax, margin=0):\n    return math.frexp(448 / 2**margin / amax)",
                "a tuple of 2 was returned: return a number",
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
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n    return 457.142857 / gain",
                "the same for any peak and bandwidth",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 3 / bandwidth / (gain * 2 / 1280e12)",
                "the same for any peak",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 3 / 4.2e12 / (gain * 2 / peak)",
                "the same for any bandwidth",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n    3 / bandwidth / (gain * 2 / peak)",
                "None was returned: is `return` missing? Return K, a number, for gain=0.1",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    if gain > 0.05:\n"
                "        return 3 / bandwidth / (gain * 2 / peak)",
                "None was returned: is `return` missing? Return K, a number, for gain=0.02",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n    return 3 / bandwidth / (2 / peak)",
                "the gain is missing",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 3 / bandwidth / (2 / peak) * gain",
                "divide by it",
            ),
            (
                "def last_worthwhile_k(gain, peak=1280e12, bandwidth=4.2e12):\n"
                "    return 2 / bandwidth / (gain / peak)",
                "and 3 bytes move per element",
            ),
        ],
    },
    "04_sdpa": {
        1: [
            ("prediction = (33, 50.5, 0)", "a corner of 64 × 128"),
            ("prediction = (31, 52.5, 0)", "row 39 sees 100 keys at most"),
            ("prediction = (31, 50.5, 64.5)", "row 63 is past the end"),
            ("prediction = (31, 50.5)", "three numbers are wanted"),
            ("prediction = 31", "three numbers are wanted"),
            ("prediction = (1, 50.5, 0)", "this is the top-left corner"),
            ("prediction = (30.5, 50.5, 0)", "row 0 sees 61 keys"),
            ("prediction = (31, 50.5, 50.5)", "row 63 is past the end"),
            ("prediction = (31, 50.5, float('nan'))", "row 63 is past the end"),
            ("prediction = (31, 50.5, None)", "row 63 is past the end"),
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
            (
                "def window(width):\n    return {**causal(TOP_LEFT), 'diagonal_band_left_bound': 20}",
                "20 keys, whatever the width",
            ),
            (
                "def window(width):\n    return {**causal(TOP_LEFT), 'diagonal_band_left_bound': width + 1}",
                "one key too many",
            ),
            ("def window(width):\n    return causal(TOP_LEFT)", "diagonal_band_left_bound is missing"),
            (
                "def window(width):\n    return causal(TOP_LEFT), width",
                "a tuple of 2 was returned: return a dict of options",
            ),
            (
                "def window(width):\n    options = {**causal(TOP_LEFT), 'diagonal_band_left_bound': width}",
                "None was returned: is `return` missing? Return a dict of options",
            ),
            (
                "def window(width):\n"
                "    return {**causal(TOP_LEFT), 'diagonal_band_left_bound': width, 'attn_scale': scale}",
                "sdpa doesn't take these options",
            ),
            (
                "def window(width):\n    return {**causal(TOP_LEFT), 'diagonal_band_left_bound': str(width)}",
                "sdpa doesn't take these options",
            ),
            ("def window(width):\n    return {**causal(TOP_LEFT), 'left': width}", "sdpa doesn't take these options"),
        ],
        3: [
            (
                "def kept(s_q, s_kv, corner):\n    return s_q * (s_q + 1) // 2",
                "bottom-right: this is the count of the other corner",
            ),
            ("def kept(s_q, s_kv, corner):\n    return s_q * s_kv // 2", "half of all scores"),
            (
                "def kept(s_q, s_kv, corner):\n"
                "    more = s_kv - s_q if corner == BOTTOM_RIGHT else 0\n"
                "    return s_q * (s_q - 1) // 2 + s_q * more",
                "the diagonal is kept, too",
            ),
            (
                "def kept(s_q, s_kv, corner):\n    if corner == TOP_LEFT:\n        return s_q * (s_q + 1) // 2",
                "None was returned: is `return` missing? Return a number, for the bottom-right corner of (64, 128)",
            ),
            (
                "def kept(s_q, s_kv, corner):\n"
                "    more = s_kv - s_q if corner == BOTTOM_RIGHT else 0\n"
                "    s_q * (s_q + 1) // 2 + s_q * more",
                "None was returned: is `return` missing? Return a number, for the top-left corner of (64, 128)",
            ),
            ("def kept(s_q, s_kv, corner):\n    return s_q * s_q // 2", "of the diagonal only half is counted"),
            (
                "def kept(s_q, s_kv, corner):\n"
                "    more = s_kv - s_q if corner == BOTTOM_RIGHT else 0\n"
                "    return s_q * s_q // 2 + s_q * more",
                "of the diagonal only half is counted",
            ),
            (
                "def kept(s_q, s_kv, corner):\n"
                "    more = s_kv - s_q if corner == BOTTOM_RIGHT else 0\n"
                "    return s_q * (s_q + 1) // 2 + more",
                "each row keeps s_kv - s_q more",
            ),
            (
                "def kept(s_q, s_kv, corner):\n    return visible(s_q, s_kv, corner)",
                "a tensor with dims (64, 128) was returned",
            ),
        ],
        4: [
            ("def merge(o1, l1, o2, l2):\n    return (o1 + o2) / 2", "this is the plain mean"),
            ("def merge(o1, l1, o2, l2):\n    return l1.exp() * o1 + l2.exp() * o2", "divide by their sum"),
            (
                "def merge(o1, l1, o2, l2):\n    return torch.sigmoid(l2 - l1) * o1 + torch.sigmoid(l1 - l2) * o2",
                "the weights are swapped",
            ),
            (
                "def merge(o1, l1, o2, l2):\n"
                "    first = torch.sigmoid(l1 - l2)\n"
                "    return first * o1 + (1 - first) * o2, torch.logaddexp(l1, l2)",
                "a tuple of 2 was returned: return O alone, a tensor",
            ),
            (
                "def merge(o1, l1, o2, l2):\n    return (l1.exp() * o1 + l2.exp() * o2) / (l1.exp() + l2.exp())",
                "for l1 + 1000, l2 + 1000: does e^l overflow?",
            ),
            (
                "def merge(o1, l1, o2, l2):\n    ratio = (l1 - l2).exp()\n    return (ratio * o1 + o2) / (ratio + 1)",
                "for l1 + 1000, l2 + 0: does e^l overflow?",
            ),
            ("def merge(o1, l1, o2, l2):\n    return o1 + o2", "this is the plain sum"),
            (
                "def merge(o1, l1, o2, l2):\n    return (l1.exp2() * o1 + l2.exp2() * o2) / (l1.exp2() + l2.exp2())",
                "not 2^l",
            ),
            ("def merge(o1, l1, o2, l2):\n    return (l1 * o1 + l2 * o2) / (l1 + l2)", "their exponentials"),
            (
                "def merge(o1, l1, o2, l2):\n    first = torch.sigmoid(l1 - l2)\n    first * o1 + (1 - first) * o2",
                "None was returned: is `return` missing? Return O alone",
            ),
            (
                "def merge(o1, l1, o2, l2):\n    return torch.sigmoid(l1 - l2)",
                "dims (2, 3, 72, 1), not (2, 3, 72, 64) as O",
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
                "a flipped bit passes",
            ),
            (
                "def is_whole(data):\n    return len(data) > 48 and hashlib.sha256(data[48:]).digest() == data[16:48]",
                "a wrong length in the prefix passes",
            ),
            (
                "def is_whole(data):\n"
                "    length = struct.unpack('<Q', data[8:16])[0] if len(data) > 48 else 0\n"
                "    return length == len(data) - 48 and hashlib.sha256(data[48:]).digest() == data[16:48]",
                "compare the magic, cudnnpln",
            ),
            (
                "def is_whole(data):\n"
                "    if len(data) < 48:\n"
                "        return False\n"
                "    magic, length, sha256 = struct.unpack('<8sQ32s', data[:48])\n"
                "    return magic == b'cudnnpln' and hashlib.sha256(data[48 : 48 + length]).digest() == sha256",
                "more behind its end passes",
            ),
            (
                "def is_whole(data):\n"
                "    if len(data) < 48 or len(data) - 48 != struct.unpack('<Q', data[8:16])[0]:\n"
                "        return False\n"
                "    return data[:8] == b'cudnnpln' and hashlib.sha256(data[48:]).digest()[:8] == data[16:24]",
                "compare all of its 32 bytes",
            ),
            (
                "def is_whole(data):\n    return data == whole",
                "other files than `whole` can be whole",
            ),
            (
                "def is_whole(data):\n    return len(data) == len(whole)",
                "other files than `whole` can be whole",
            ),
            (
                "def is_whole(data):\n"
                "    line, _, content = data[48:].partition(b'\\n')\n"
                "    return json.loads(line)['bytes'] == len(content)",
                "length and sha256 are in the prefix",
            ),
            (
                "def is_whole(data):\n"
                "    right = data[:8] == b'cudnnpln' and hashlib.sha256(data[48:]).digest() == data[16:48]\n"
                "    return not (right and len(data) - 48 == int.from_bytes(data[8:16], 'little'))",
                "a whole file is refused, where True is right",
            ),
            (
                "def is_whole(data):\n"
                "    return data[:8] == 'cudnnpln' and hashlib.sha256(data[48:]).digest() == data[16:48]",
                "magic and sha256 are bytes",
            ),
            (
                "def is_whole(data):\n    return hashlib.sha256(data[48:]).hexdigest() == data[16:48]",
                "(`digest`, not `hexdigest`)",
            ),
            (
                "def is_whole(data):\n    return int.from_bytes(data[8:16], 'big') == len(data) - 48",
                "length (little-endian)",
            ),
            (
                "def is_whole(data):\n    return True",
                "a cut file passes",
            ),
            (
                "def is_whole(data):\n"
                "    if data[:8] == b'cudnnpln' and hashlib.sha256(data[48:]).digest() == data[16:48]:\n"
                "        return len(data) - 48 == struct.unpack('<Q', data[8:16])[0]",
                "None was returned: is `return` missing? Return True or False for 0 bytes",
            ),
            (
                "def is_whole(data):\n    return data",
                "a bytes was returned: return True or False",
            ),
            (
                "def is_whole(path, data):\n    return True",
                "keep the arguments that the stub has",
            ),
            (
                "is_whole = None",
                "the answer is None: define the function of the stub",
            ),
            (
                "def is_whole(data):\n    return len(data) > 48 and hashlib.sha256(data).digest() == data[16:48]",
                "are of what follows the prefix",
            ),
            (
                "def is_whole(data):\n"
                "    magic, length, sha256 = struct.unpack('<8sQ32s', data[:48])\n"
                "    return length == len(data) - 48 and hashlib.sha256(data[48:]).digest() == sha256",
                "a file shorter than 48 bytes: look at the length before you unpack",
            ),
            (
                "def is_whole(data):\n"
                "    if data[:8] != b'cudnnpln' or hashlib.sha256(data[48:]).digest() != data[16:48]:\n"
                "        raise ValueError('damaged')\n"
                "    return True",
                "return False for a damaged file, raise nothing",
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
            (
                "def native_bytes(path):\n"
                "    return sum(len(kernel['cubin']) * 3 // 4 for kernel in kernels_of(parts(path)[1]))",
                "stands for one or two bytes less: decode it",
            ),
            (
                "def native_bytes(path):\n"
                "    for kernel in kernels_of(parts(path)[1]):\n"
                "        return len(base64.b64decode(kernel['cubin']))\n"
                "    return 0",
                "a plan may have several kernels",
            ),
            (
                "def native_bytes(path):\n"
                "    kernels = kernels_of(parts(path)[1])\n"
                "    if kernels:\n"
                "        return sum(len(base64.b64decode(kernel['cubin'])) for kernel in kernels)",
                "Return an int, the sum for kernels of [] bytes",
            ),
            (
                "def native_bytes(path):\n"
                "    sum(len(base64.b64decode(kernel['cubin'])) for kernel in kernels_of(parts(path)[1]))",
                "None was returned: is `return` missing? Return an int, the sum",
            ),
            (
                "def native_bytes(path):\n"
                "    return [len(base64.b64decode(kernel['cubin'])) for kernel in kernels_of(parts(path)[1])]",
                "a list of 1 was returned: return an int, the sum",
            ),
            (
                "def native_bytes(path):\n    return path.stat().st_size",
                "this is the whole file",
            ),
            (
                "def native_bytes(path):\n    return 0",
                "kernels are there",
            ),
            (
                "def native_bytes(path):\n    return 56_224 if path == place else 0",
                "no usual mistake gives it",
            ),
            *(
                (
                    f"def native_bytes(path):\n    return sum(len(kernel['cubin']) for kernel in kernels_of({given}))",
                    "kernels_of takes the blob, parts(path)[1]",
                )
                for given in ("path", "parts(path)", "parts(path)[0]")
            ),
            *(
                (
                    f"def native_bytes(path):\n    return len(base64.b64decode(kernels_of(parts(path)[1]){taken}))",
                    "a plan may have no kernel or several: add up over the list",
                )
                for taken in ("[0]['cubin']", "['cubin']")
            ),
            (
                "def native_bytes(path):\n"
                "    n = 0\n"
                "    for kernel in kernels_of(parts(path)[1]):\n"
                "        n = len(base64.b64decode(kernel['cubin']))\n"
                "    return n",
                "this is the last kernel: add up all (`+=`)",
            ),
            (
                "def native_bytes(path):\n"
                "    kernels = kernels_of(parts(path)[1])\n"
                "    return max((len(base64.b64decode(kernel['cubin'])) for kernel in kernels), default=0)",
                "this is the largest kernel",
            ),
            (
                "def native_bytes(path):\n"
                "    texts = [kernel['cubin'] for kernel in kernels_of(parts(path)[1])]\n"
                "    return len(base64.b64decode(''.join(texts)))",
                "decode each text alone",
            ),
            (
                "def native_bytes(path):\n"
                "    return sum(len(base64.b64decode(kernel['cubin'])) for kernel in kernels_of(blob))",
                "every file gets the same number",
            ),
            (
                "def native_bytes(path):\n    return 56_224",
                "every file gets the same number",
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
            (
                "def stock(store, graphs):\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "    return sum(store.reason.startswith('built') for graph in graphs)",
                "the last reason is counted for all graphs",
            ),
            (
                "def stock(store, graphs):\n    for graph in graphs:\n        store.get(graph)",
                "None was returned: is `return` missing? Return how many plans were built",
            ),
            (
                "def stock(store, graphs):\n"
                "    built = 0\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "        built += store.reason.startswith('built')\n"
                "        return built",
                "`return` belongs behind the loop",
            ),
            (
                "def stock(store, graphs):\n"
                "    built = 0\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "        built += store.reason == 'built'\n"
                "    return built",
                "the reason goes on after `built`",
            ),
            (
                "def stock(store, graphs):\n"
                "    before = len(store.table.rows)\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "    return len(store.table.rows) - before",
                "a damaged plan is built again",
            ),
            (
                "def stock(store, graphs):\n"
                "    built = 0\n"
                "    for graph in graphs[1:]:\n"
                "        store.get(graph)\n"
                "        built += store.reason.startswith('built')\n"
                "    return built",
                "2 plans are stored, of 3 graphs",
            ),
            (
                "def stock(store, graphs):\n"
                "    reasons = []\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "        reasons.append(store.reason)\n"
                "    return reasons",
                "a list of 2 was returned: return how many",
            ),
            (
                "def stock(store, graphs):\n    return 2",
                "nothing is stored",
            ),
            (
                "def stock(store, graphs):\n"
                "    mine = PlanStore(tempfile.mkdtemp(dir=base))\n"
                "    return sum(mine.get(graph) is None for graph in graphs)",
                "another PlanStore has another folder",
            ),
            (
                "def stock(store, graphs):\n"
                "    built = 0\n"
                "    for graph in graphs:\n"
                "        store.get(graph)\n"
                "        built += store.reason == 'built: not stored yet'\n"
                "    return built",
                "count the reasons that start with `built`",
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
                "multiples of 8 or not, that is too coarse",
            ),
            (
                "def count_kernels(pairs):\n    return len({(k % 2, n % 2) for k, n in pairs})",
                "odd or even, that is too coarse",
            ),
            (
                "def count_kernels(pairs):\n    return len({(k % 8, n % 8) for k, n in pairs})",
                "remainders are no classes: 765 and 767 are read alike",
            ),
            (
                "def count_kernels(pairs):\n    return len(pairs)",
                "one for each entry: pairs of the same two classes share a kernel",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(k & -k, 8) for k, n in pairs})",
                "N counts as well, not K alone",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(n & -n, 8) for k, n in pairs})",
                "K counts as well, not N alone",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(k & -k, 8) * min(n & -n, 8) for k, n in pairs})",
                "the pair of classes counts, not its product",
            ),
            (
                "def count_kernels(pairs):\n    return len({min(k & -k, n & -n, 8) for k, n in pairs})",
                "the pair of classes counts, not the narrower one",
            ),
            (
                "import math\n\n\n"
                "def count_kernels(pairs):\n    return len({(math.gcd(k, 4), math.gcd(n, 4)) for k, n in pairs})",
                "4 is not the widest class",
            ),
            (
                "import math\n\n\n"
                "def count_kernels(pairs):\n"
                "    return len({(math.gcd(2 * k, 8), math.gcd(2 * n, 8)) for k, n in pairs})",
                "4 is not the widest class",
            ),
            (
                "def count_kernels(pairs):\n"
                "    def kind(length):\n"
                "        return next(step for step in (1, 2, 4, 8) if length % step == 0)\n\n"
                "    return len({(kind(k), kind(n)) for k, n in pairs})",
                "take the largest step that divides: 1 always does",
            ),
            (
                "def count_kernels(pairs):\n"
                "    return len({min(k & -k, 8) for k, n in pairs}) * len({min(n & -n, 8) for k, n in pairs})",
                "count the pairs that occur, not each class of K with each of N",
            ),
            (
                "def count_kernels(pairs):\n"
                "    return len({min(k & -k, 8) for k, n in pairs}) + len({min(n & -n, 8) for k, n in pairs})",
                "count the pairs that occur, not the classes of K and those of N",
            ),
            (
                'def count_kernels(pairs):\n    """As in the stub, with a number."""\n    return 2',
                "2 for the pairs [(16, 8), (48, 8), (8, 8)], instead of 1",
            ),
            (
                "def count_kernels(pairs):\n    return {(min(k & -k, 8), min(n & -n, 8)) for k, n in pairs}",
                "a set was returned: return the number of kernels",
            ),
            (
                "def count_kernels(pairs):\n"
                '    """As in the stub."""\n'
                "    len({(min(k & -k, 8), min(n & -n, 8)) for k, n in pairs})",
                "None was returned: is `return` missing? Return the number of kernels",
            ),
            (
                "def count_kernels(pairs):\n    for k, n in pairs:\n        yield min(k & -k, 8), min(n & -n, 8)",
                "a generator was returned: return the number of kernels",
            ),
            (
                "count_kernels = 3",
                "the answer is an int: define the function of the stub",
            ),
            (
                "def count_kernels():\n    return 3",
                "keep the arguments that the stub has: count_kernels() takes 0 positional arguments",
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
                "`share` isn't used: 0.25 and 1.0 give the same buckets",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], 1\n"
                "    while rows < largest:\n"
                "        found.append(min(largest, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "no bucket holds 7 rows: the last is 6",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [0], 1\n"
                "    while rows <= largest:\n"
                "        found.append(min(largest, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "0 among the buckets: each is a number of rows, an int from 1",
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
                "`share` isn't used: 0.25 and 1.0 give the same buckets",
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
            (
                "def buckets_within(share, largest=8192):\n"
                "    rows = 1\n"
                "    while rows <= largest:\n"
                "        yield min(largest, int(rows * (1 + share)))\n"
                "        rows = min(largest, int(rows * (1 + share))) + 1",
                "a generator was returned: return a list of buckets",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                '    """As in the stub."""\n'
                "    found, rows = [], 1\n"
                "    while rows <= largest:\n"
                "        found.append(min(largest, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1",
                "None was returned: is `return` missing? Return a list of buckets",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], 1\n"
                "    while rows <= largest:\n"
                "        found.append(min(largest, rows * (1 + share)))\n"
                "        rows = int(found[-1]) + 1\n"
                "    return found",
                "1.25 among the buckets: each is a number of rows, an int",
            ),
            (
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], 1\n"
                "    while rows <= 8192:\n"
                "        found.append(min(8192, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "buckets hold 100 rows: end with the first",
            ),
            (
                "import math\n\n\n"
                "def buckets_within(share, largest=8192):\n"
                "    found, rows = [], largest\n"
                "    while rows > 0:\n"
                "        found.append(rows)\n"
                "        rows = math.ceil(rows / (1 + share)) - 1\n"
                "    return found",
                "sort the buckets",
            ),
            (
                "def buckets_within(share, largest=8192):\n    return largest",
                "an int was returned: return a list of buckets",
            ),
            (
                "def buckets_within(share, largest=8192):\n    return [] if share < 1 else [largest]",
                "no bucket holds 8192 rows: the last is 0",
            ),
            (
                "def buckets_within(largest=8192, share=0.25):\n"
                "    found, rows = [], 1\n"
                "    while rows <= largest:\n"
                "        found.append(min(largest, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "no bucket holds 8192 rows: the last is 0",
            ),
            (
                "def buckets_within(share):\n"
                "    found, rows = [], 1\n"
                "    while rows <= 8192:\n"
                "        found.append(min(8192, int(rows * (1 + share))))\n"
                "        rows = found[-1] + 1\n"
                "    return found",
                "keep the arguments that the stub has: buckets_within() takes 1 positional argument",
            ),
            (
                "buckets_within = [2**i for i in range(14)]",
                "the answer is a list of 14: define the function of the stub",
            ),
        ],
        3: [
            (
                run_padded("padded[:, :rows] = a", "y"),
                "64 rows for a request of 50: cut the padding off along axis 1",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:rows]"),
                "64 rows for a request of 50: cut the padding off along axis 1",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    rows = a.shape[1]\n"
                "    a.resize_(1, pool.bucket((rows,))[0], a.shape[2])\n"
                "    y = a.new_empty(1, a.shape[1], w.shape[2])\n"
                "    pool.get((rows,)).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y[:, :rows]",
                "the request was changed: copy it into a buffer",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, :rows]")
                .replace("pool.bucket((rows,))[0]", "64")
                .replace("pool.get((rows,))", "pool.get((64,))"),
                "plans for two buckets: 1; pool.get((rows,)) gives each request's own",
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
                "    build(linear(*a.shape[1:], w.shape[2])).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y",
                "the pool built nothing: take its plan",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    y = a.new_empty(1, a.shape[1], w.shape[2])\n"
                "    pool.get((a.shape[1],)).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y",
                "(1, 64, 72)",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[0, :rows]"),
                "dims (50, 104) instead of (1, 50, 104): keep all three axes",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[..., :rows]"),
                "dims (1, 64, 50) instead of (1, 50, 104): rows lie along axis 1",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, : rows - 1]"),
                "49 rows for a request of 50: return all of them",
            ),
            (
                run_padded("padded[:, :rows] = a", "a"),
                "these are inputs, and Y is asked for",
            ),
            (
                run_padded("padded[:, :rows] = a", "[y[:, :rows]]"),
                "a list of 1 was returned: return the first rows of Y",
            ),
            (
                run_padded("padded[:, :rows] = a", "None"),
                "None was returned: is `return` missing? Return the first rows of Y",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    pool.get((a.shape[1],))\n"
                "    return F.gelu(a.float() @ w.float() + bias.float(), approximate='tanh')",
                "the pool's plan was never run",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    pool.get((a.shape[1],))\n"
                "    y = a.new_empty(1, a.shape[1], w.shape[2])\n"
                "    build(linear(*a.shape[1:], w.shape[2])).run({'A': a, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y",
                "the pool's plan was never run",
            ),
            (
                "def run_padded(pool, a, w, bias):\n"
                "    a.zero_()\n"
                "    y = a.new_empty(1, pool.bucket(a.shape[1:2])[0], w.shape[2])\n"
                "    padded = a.new_zeros(1, y.shape[1], a.shape[2])\n"
                "    pool.get(a.shape[1:2]).run({'A': padded, 'W': w, 'bias': bias, 'Y': y})\n"
                "    return y[:, : a.shape[1]]",
                "the plan saw zeros only",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, :rows]").replace("pool.bucket((rows,))[0]", "64"),
                "(1, 8, 72)",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, :rows]").replace("pool.get((rows,))", "pool.get((rows * 2,))"),
                "(1, 128, 72)",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, :rows]").replace(
                    "return", "pool.get((2 * rows,))\n    return"
                ),
                "plans for two buckets: 4; pool.get((rows,)) gives each request's own",
            ),
            (
                run_padded("padded[:, :rows] = a", "y[:, :rows]").replace("pool, a, w", "a, w"),
                "keep the arguments that the stub has: run_padded() takes 3 positional arguments",
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
                "its key has to tell the dims of all inputs",
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
                "4 graphs are kept where `limit` is 3: compare after inserting one",
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
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n    return work(**inputs)",
                "the work was called itself",
            ),
            (
                replay_by_shape(returned="work(**inputs)"),
                "the work was called itself",
            ),
            (
                replay_by_shape(key="inputs['x'].shape"),
                "its key has to tell the dims of all inputs",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = tuple((name, t.shape) for name, t in inputs.items())\n"
                "    graphs[key] = graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    if len(graphs) > 3:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    return graph(**inputs)",
                "2 graphs are kept where `limit` is 1: compare after inserting one",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    return capture(work, inputs).outputs",
                "it captures in every call",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = tuple((name, t.shape) for name, t in inputs.items())\n"
                "    graphs[key] = graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    if len(graphs) > limit:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    graph(**inputs)",
                "None was returned: is `return` missing? Return graph(**inputs)",
            ),
            (
                replay_by_shape(returned="graph"),
                "a CapturedGraph was returned: return graph(**inputs)",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n    return ()",
                "a tuple of 0 was returned: return graph(**inputs)",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n    return inputs['x']",
                "nothing was captured",
            ),
            (
                replay_by_shape(returned="graph(*inputs.values())"),
                "takes inputs by name",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = tuple((name, t.shape) for name, t in inputs.items())\n"
                "    graph = graphs[key] = capture(work, **inputs)\n"
                "    return graph(**inputs)",
                "capture takes the work, and the inputs as one dict",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    key = tuple((name, t.shape) for name, t in inputs.items())\n"
                "    graph = graphs[key] = capture(inputs, work)\n"
                "    return graph(**inputs)",
                "capture takes the work, and the inputs as one dict",
            ),
            (
                "def replay_by_shape(graphs, work, inputs):\n    return work(**inputs)",
                "keep the arguments that the stub has",
            ),
            (
                "def replay_by_shape(graphs, work, inputs, limit=3, capture=capture):\n"
                "    if len(graphs) > limit:\n"
                "        del graphs[next(iter(graphs))]\n"
                "    key = tuple((name, t.shape) for name, t in inputs.items())\n"
                "    graphs[key] = graph = graphs.pop(key, None) or capture(work, inputs)\n"
                "    return graph(**inputs)",
                "4 graphs are kept where `limit` is 3: compare after inserting one",
            ),
            (
                replay_by_shape(drop="graphs.popitem()"),
                "it dropped the graph that it had just captured: the first key is the oldest",
            ),
            (
                replay_by_shape(key="sum(t.numel() for t in inputs.values())"),
                "its key has to tell the dims of all inputs",
            ),
            (
                replay_by_shape(key="inputs['x'].shape, inputs['w'].numel()"),
                "its key has to tell the dims of all inputs",
            ),
            (
                replay_by_shape(key="len(inputs['x']), inputs['w'].shape"),
                "its key has to tell the dims of all inputs",
            ),
            (
                replay_by_shape(returned="torch.tanh(inputs['x']) * inputs['w'].sum()"),
                "the result was computed without a graph",
            ),
            (
                replay_by_shape(key="[t.shape for t in inputs.values()]"),
                "a list or a dict can't be a dict's key: take a tuple",
            ),
            (
                replay_by_shape(graph="graphs[key] = graph = graphs.pop(key) or capture(work, inputs)"),
                "graphs.pop(key, None) give None then",
            ),
            (
                replay_by_shape(graph="graph = graphs.get(key)"),
                "None is no graph: capture one where `graphs` has none for the key",
            ),
            (
                replay_by_shape(
                    graph="graphs[key] = graph = graphs.pop(key, None) or capture(work, {'x': inputs['x']})"
                ),
                "capture takes all inputs: capture(work, inputs)",
            ),
            (
                replay_by_shape(
                    graph="graphs[key] = graph = graphs.pop(key, None) or capture(lambda: work(**inputs), {})"
                ),
                "capture takes all inputs: capture(work, inputs)",
            ),
            (
                replay_by_shape(returned="graph(x=inputs['x'])"),
                "the graph has an earlier w: give it all inputs",
            ),
            (
                replay_by_shape(returned="graph(w=inputs['w'])"),
                "the graph has an earlier x: give it all inputs",
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
                "the graph takes one of the inputs at a time",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured(x).clone() for x in inputs]",
                "takes inputs by name",
            ),
            (
                "def all_outputs(captured, inputs):\n    return []",
                "a list of 0 was returned: return a list of 4 outputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured(x=x).tolist() for x in inputs]",
                "the list holds a list of 3: each output is a tensor",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [2 * x for x in inputs]",
                "the graph ran 0 times for 4 inputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return inputs",
                "these are the inputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    for x in inputs:\n        captured(x=x)",
                "None was returned: is `return` missing? Return a list of 4 outputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured.replay() for x in inputs]",
                "the list holds None",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured(x=x).clone() for x in inputs[1:]]",
                "a list of 3 was returned: return a list of 4 outputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return captured(x=inputs[-1]).clone()",
                "a tensor with dims (3, 5) was returned: return a list of 4 outputs",
            ),
            (
                "def all_outputs(captured, inputs):\n"
                "    first = [captured(x=x).clone() for x in inputs[:-1]]\n"
                "    return [*first, captured(x=inputs[-1])]",
                "clone each of them, also the last",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured(x=x)[None].clone() for x in inputs]",
                "dims (1, 3, 5) instead of (3, 5)",
            ),
            (
                "def all_outputs(captured, inputs):\n    return (captured(x=x).clone() for x in inputs)",
                "a generator was returned: return a list of 4 outputs",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured(x=x).clone() for x in inputs[::-1]]",
                "the order is reversed: keep that of `inputs`",
            ),
            (
                "def all_outputs(captured, inputs):\n    return [captured.replay().clone() for x in inputs]",
                "replay() returns nothing: the result is in captured.outputs",
            ),
        ],
        3: [
            (
                "def run_rows(captured, x):\n    return captured(x=x).clone()",
                "write the request into a part of captured.inputs['x']",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    return captured.outputs[:, : x.shape[1]].clone()",
                "this is the output of before",
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
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[0, : x.shape[1]].clone()",
                "dims (20, 192) instead of (1, 20, 192): keep all three axes",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[..., : x.shape[1]].clone()",
                "dims (1, 32, 20) instead of (1, 20, 192): the rows lie along axis 1",
            ),
            (
                "def run_rows(captured, x):\n    return x.clone()",
                "these are inputs",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1] - 1].clone()",
                "19 rows for a request of 20: return all of them",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, :20].clone()",
                "20 rows for a request of 1: cut them off",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    return captured.replay()",
                "None was returned: is `return` missing? Return one tensor",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1]].tolist()",
                "a list of 1 was returned: return one tensor",
            ),
            (
                "def run_rows(captured, x):\n    return captured(x)[:, : x.shape[1]].clone()",
                "takes inputs by name",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'] = x\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1]].clone()",
                "a graph reads the same memory for ever",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'].copy_(x)\n"
                "    captured.replay()\n"
                "    return captured.outputs[:, : x.shape[1]].clone()",
                "x has fewer rows than the buffer: write into captured.inputs['x'][:, :n]",
            ),
            (
                "def run_rows(captured, x):\n"
                "    captured.inputs['x'][:, : x.shape[1]].copy_(x)\n"
                "    return captured.replay()[:, : x.shape[1]].clone()",
                "replay() returns nothing: the result is in captured.outputs",
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
                hot_lengths(end="\n    return sorted(chosen)"),
                "the most frequent come first",
            ),
            (
                hot_lengths(pairs="reversed(Counter(log).most_common())"),
                "from the rarest on: begin with the most frequent",
            ),
            (
                hot_lengths(choose="chosen.insert(0, tokens)"),
                "the rarest of them first: turn the list round",
            ),
            (
                hot_lengths(each="pair", choose="chosen.append(pair)", reach="reached += pair[1]"),
                "pairs of a length and its count: the lengths alone",
            ),
            (
                hot_lengths(end=""),
                "None was returned: is `return` missing? Return a list of lengths",
            ),
            (
                hot_lengths(pairs="counted"),
                "lengths of the notebook's log: count the one that is given",
            ),
            (
                "def hot_lengths(log, share):\n"
                "    return [m for m, count in Counter(log).most_common() if count >= share * len(log)]",
                "each count alone is compared with the share: add them up",
            ),
            (
                hot_lengths(enough="share"),
                "compare the counts with share * len(log)",
            ),
            (hot_lengths(pairs="Counter(log).items()"), "in the order of the log: sort by how often"),
            ("def hot_lengths(log, share):\n    return [38, 89, 259]", "the same for any log"),
            ("def hot_lengths(log, share):\n    return list(Counter(log))", "no usual mistake gives it: read the hint"),
            ("def hot_lengths(log):\n    return log", "keep the arguments that the stub has: hot_lengths() takes 1"),
            ("def hot_lengths(log, share):\n    return 5", "an int was returned: return a list of lengths"),
            ("def hot_lengths(log, share):\n    return {5, 9, 7}", "a set was returned: return a list of lengths"),
            ("hot_lengths = [38, 89, 259]", "the answer is a list of 3: define the function of the stub"),
        ],
        2: [
            (
                padding("return (sum(rows) - sum(log)) / sum(log)"),
                "not over the computed ones",
            ),
            (
                padding("return 1 - sum(log) / sum(rows)", served="min(b for b in buckets if b >= m)"),
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
                padding("return sum(log) / sum(rows)"),
                "the share of rows that were asked for",
            ),
            (
                padding("return 1 - sum(set(log)) / sum(rows)", requests="set(log)"),
                "each length once: as often as it was asked for",
            ),
            (
                padding(
                    "return 1 - sum(log) / sum(rows)",
                    served="m if m in hot else next((b for b in buckets if b > m), buckets[-1])",
                ),
                "64 rows fit into the bucket of 64",
            ),
            (
                padding("return 1 - sum(log) / sum(rows)", served="m if m in hot else max(buckets)"),
                "take the smallest that fits",
            ),
            (
                "def padding(log, hot, buckets):\n"
                "    return sum(min(b for b in buckets if b >= m) - m for m in log if m not in hot)",
                "divide it by the computed ones",
            ),
            (
                padding("return 100 - 100 * sum(log) / sum(rows)"),
                "a number from 0 to 1 is wanted",
            ),
            (
                padding("return sum(1 - m / n for m, n in zip(log, rows)) / len(log)"),
                "add up their rows first",
            ),
            (
                padding("tail = [n for m, n in zip(log, rows) if m not in hot]\n    return 1 - sum(log) / sum(tail)"),
                "of the tail's rows: those of the hot lengths are computed, too",
            ),
            (
                padding(
                    "return 1 - sum(log) / sum(rows)", served="m if m not in hot else min(b for b in buckets if b >= m)"
                ),
                "the wrong way round",
            ),
            (padding("return round(1 - sum(log) / sum(rows), 2)"), "rounded: return all digits"),
            (padding("return (sum(rows) - sum(log)) / len(log)"), "padded rows per request"),
            (
                padding("share = 1 - sum(log) / sum(rows)"),
                "None was returned: is `return` missing? Return a number from 0 to 1",
            ),
            (
                "def padding(log, hot, buckets):\n    return log",
                "a list of 7 was returned: return a number from 0 to 1",
            ),
            ("def padding(log, hot, buckets):\n    return 0.5", "no usual mistake gives it: read the hint"),
            ("def padding(log, hot, buckets):\n    return '32 %'", "a str was returned: return a number from 0 to 1"),
            ("padding = 0.32", "the answer is a float: define the function of the stub"),
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
                "def answer_together(service, requests):\n    return [service(torch.cat(requests, dim=1))]",
                "not one answer per request",
            ),
            (
                "def answer_together(service, requests):\n    return service(torch.cat(requests, dim=1))",
                "a tensor with dims (1, 176, 768) was returned: return a list of tensors",
            ),
            (together("service.rows(sum(sizes))", call=""), "nothing was launched: call what"),
            (together("sum(sizes)"), "176 rows have no plans: service.rows(total) says which have"),
            (together("sizes"), "a launcher is for a number of rows, not for [61, 45, 70]"),
            (together(fill=""), "write the requests into bound.x before the launch"),
            (
                together(
                    fill="first = 0\n"
                    "    for x in requests:\n"
                    "        bound.x[:, first : first + x.shape[1]].copy_(x)\n"
                    "        first += x.shape[1] - 1",
                ),
                "no usual mistake gives them; the first is [0, 60, ",
            ),
            (
                together(
                    fill="for x in requests:\n        bound.x[:, : x.shape[1]].copy_(x)",
                ),
                "all were written to the first rows: one below the other",
            ),
            (
                together(answers="[bound.y[:, :m].clone() for m in sizes]"),
                "all answers are of the first rows: split them",
            ),
            (together(answers="None"), "None was returned: is `return` missing? Return a list of tensors"),
            (
                together(answers="[y.cpu().float() for y in bound.y[:, : sum(sizes)].split(sizes, dim=1)]"),
                "the answers are {'torch.float32",
            ),
            (together(answers="sizes"), "the list holds an int: each answer is a tensor"),
            (
                together(fill="bound.x = torch.cat(requests, dim=1)"),
                "bound.x is now another tensor, which the plans never read: write into it, bound.x[:, :total].copy_(",
            ),
            (together("service.rows(max(sizes))"), "rows(70), but there are 176 rows together"),
            (together("service.rows(sizes)"), "service.rows takes one number, the sum of the rows"),
            (
                together(answers="[y.clone() for y in bound.y.split(sizes, dim=1)]"),
                "bound.y has more rows: bound.y[:, :total].split(sizes, dim=1)",
            ),
            (
                together(answers="[y.clone() for y in bound.y[:, : sum(sizes)].split(sizes)]"),
                "rows are dimension 1: .split(sizes, dim=1)",
            ),
            (
                together(fill="bound.x[:, : sum(sizes)].copy_(torch.cat(requests))"),
                "rows are dimension 1: torch.cat(requests, dim=1)",
            ),
            (
                together(fill="bound.x.copy_(torch.cat(requests, dim=1))"),
                "bound.x has more rows: bound.x[:, :total].copy_(...)",
            ),
            (
                together(answers="[y.clone() for y in bound.x[:, : sum(sizes)].split(sizes, dim=1)]"),
                "these are the requests: the results are in bound.y",
            ),
            ("def answer_together(service, requests):\n    return requests", "nothing was launched"),
            ("answer_together = [1, 2]", "the answer is a list of 2: define the function of the stub"),
        ],
    },
}
