"""What README.md takes from the notebooks' stored outputs: headline results, where they come from, and the picture.

    python tests/readme.py            rewrites README.md and the picture where they differ
    python tests/readme.py --check    says what differs, and changes nothing

A test compares the same.
"""

import base64
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

import notebook_rules as rules  # noqa: E402

README = REPO / "README.md"
PICTURE = REPO / ".github" / "fused_graph.png"
PICTURE_FROM = ("01_fused_conv_bias_relu", "draw")  # notebook and cell
STAMPED = ("gpu", "driver", "torch", "cudnn", "cudnn_frontend")


class Stored:
    """The stored outputs of one notebook."""

    def __init__(self, stem):
        self.nb = rules.read(REPO / "notebooks" / f"{stem}.ipynb")

    def cell(self, cell_id):
        return next(cell for cell in self.nb.cells if cell.id == cell_id)

    def text(self, cell_id, pattern):
        """The groups of `pattern` in a cell's stored text, as texts."""
        found = re.search(pattern, rules.stored_text(self.cell(cell_id)))
        if found is None:
            raise ValueError(f"cell {cell_id} stores nothing like {pattern!r}")
        return found.groups()

    def table(self, cell_id):
        """{first cell of a row: {column: text}} of a cell's stored table."""
        html = next(o.data["text/html"] for o in self.cell(cell_id).outputs if "text/html" in o.get("data", {}))
        html = (html if isinstance(html, str) else "".join(html)).replace("<wbr>", "")
        header, *rows = [[c.text or "" for c in row] for row in ElementTree.fromstring(html).iter("tr")]
        return {row[0]: dict(zip(header, row, strict=True)) for row in rows}

    def ms(self, cell_id):
        """{row: ms} of a comparison table."""
        return {name: float(row["ms"].replace(",", "")) for name, row in self.table(cell_id).items()}


def five_steps(nb):
    planning, compiling = nb.text("plans", r"plans: ([\d.]+) ms")[0], nb.text("compile", r"plans: ([\d.]+) ms")[0]
    return f"planning takes {float(planning):.0f} ms and compiling {float(compiling):.0f} ms"


def fused_conv(nb):
    ms, row = nb.ms("headline"), nb.table("headline")["cuDNN graph"]
    share = next(value for column, value in row.items() if column.startswith("%"))
    return (
        f"{row['vs PyTorch eager']} PyTorch eager, "
        f"{ms['torch.compile'] / ms['cuDNN graph']:.2f}× `torch.compile`; {share} of the measured matmul rate"
    )


def autotuning(nb):
    layers = nb.text(
        "worth-counts",
        r"convolutions: median gain ([\d.]+)×, largest ([\d.]+)×[^\n]*\n.*: median gain ([\d.]+)×, largest ([\d.]+)×",
    )
    conv, most_conv, matmul, most_matmul = map(float, layers)
    return (
        f"convolutions gain {conv:.2f}× on the median and {most_conv:.2f}× at most, "
        f"matmuls {matmul:.2f}× and {most_matmul:.2f}×"
    )


def fp8(nb):
    ms, row = nb.ms("headline"), nb.table("headline")["cuDNN graph"]
    compiled = ms["torch.compile"] / ms["cuDNN graph"]
    return f"{row['vs PyTorch eager']} PyTorch eager, {compiled:.2f}× `torch.compile`; {row['TFLOP/s']} TFLOP/s"


def sdpa(nb):
    ms = nb.ms("headline")
    flash, cudnn = (ms[name] / ms["cuDNN graph"] for name in ("PyTorch flash", "PyTorch cuDNN"))
    return f"{flash:.2f}× PyTorch's flash backend, {cudnn:.2f}× its cuDNN backend"


def plan_serialization(nb):
    row = nb.table("cold-table")["linear_gelu, 512 tokens"]
    return f"a compiled plan is loaded {row['fresh / loaded']} as fast as it is built on a fresh machine"


def dynamic_shapes(nb):
    cold, warm = nb.text("rivals", r"(\d+)× as fast as a static build with nothing kept, (\d+)× as fast")
    return f"after the first shapes a build is {cold}× as fast; {warm}× where CUDA's compute cache is warm"


def cuda_graphs(nb):
    launches = nb.table("by-hand-time")["CUDA graph of 20 bound plans"]["vs 20 × bound plan"]
    chain = nb.table("compiled-table")["cuDNN plans, captured"]["vs PyTorch eager"]
    return f"20 launches of a 64³ matmul {launches} as fast; 20 small layers {chain} PyTorch eager"


def hot_path(nb):
    rows = nb.table("table")
    last, naive, eager = (rows[name] for name in ("+ CUDA graphs", "naive", "PyTorch eager"))
    compiled = rows["torch.compile, cached"]["warm p50"]
    return (
        f"p99 {last['p99']} ms, against {naive['p99']} with plans built when asked for; a warm request takes "
        f"{last['warm p50']} ms, {eager['warm p50']} with PyTorch eager and {compiled} with `torch.compile`"
    )


HEADLINES = {
    "00_five_steps": five_steps,
    "01_fused_conv_bias_relu": fused_conv,
    "02_autotuning": autotuning,
    "03_fp8_amax_epilogue": fp8,
    "04_sdpa": sdpa,
    "05_plan_serialization": plan_serialization,
    "06_dynamic_shapes": dynamic_shapes,
    "07_cuda_graphs": cuda_graphs,
    "08_hot_path": hot_path,
}


def stamp():
    """GPU and versions of the stored outputs, in words; those of all notebooks have to be the same."""
    found = {tuple(Stored(stem).nb.metadata[rules.STAMP][key] for key in STAMPED) for stem in HEADLINES}
    if len(found) > 1:
        raise ValueError(f"the notebooks were executed in different places: {sorted(found)}; python tests/refresh.py")
    gpu, driver, torch, cudnn, frontend = found.pop()
    return f"{gpu}, driver {driver}, torch {torch}, cuDNN {cudnn}, cudnn-frontend {frontend}"


def updated(readme):
    """README's text with the last column of its table of notebooks, and the stamp, as the stored outputs have them."""
    for stem, headline in HEADLINES.items():
        row = next(line for line in readme.splitlines() if f"(notebooks/{stem}.ipynb)" in line)
        cells = row.split("|")
        cells[-2] = f" {headline(Stored(stem))} "
        readme = readme.replace(row, "|".join(cells))
    sentence = r"(?<=<!-- stamp -->).*?(?=<!-- end of stamp -->)"
    if not re.search(sentence, readme, re.DOTALL):
        raise ValueError("README.md has no place for the stamp: <!-- stamp --><!-- end of stamp -->")
    return re.sub(sentence, lambda _: stamp(), readme, flags=re.DOTALL)


def picture():
    """The picture of a fused graph, as bytes of a PNG."""
    stem, cell_id = PICTURE_FROM
    outputs = Stored(stem).cell(cell_id).outputs
    return base64.b64decode(next(o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})))


def differences():
    """What README.md and the picture lack, as texts."""
    text = README.read_text()
    found = [] if updated(text) == text else ["README.md differs from the stored outputs"]
    if not PICTURE.is_file() or PICTURE.read_bytes() != picture():
        found.append(f"{PICTURE.relative_to(REPO)} differs from the picture in {PICTURE_FROM[0]}")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(differences()))
    README.write_text(updated(README.read_text()))
    PICTURE.write_bytes(picture())
