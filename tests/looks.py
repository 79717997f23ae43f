"""Looks at the notebooks as pages in a browser: stored outputs, wide and narrow, light and dark.

    python tests/looks.py                                    all notebooks
    python tests/looks.py notebooks/04_sdpa.ipynb            these, or executed copies elsewhere
    python tests/looks.py --to FOLDER                        where the screenshots go (default: site/looks)
    python tests/looks.py --no-pictures                      measures alone, a third of the time

Nothing is executed: nbconvert makes a page of what each notebook stores, in its light and its dark theme, and headless
Chromium opens it at 1280 and at 400 pixels. Per notebook this takes about 30 s on two cores. Measured are

- the page: it does not scroll sideways;
- what outputs and text cells hold: nothing is wider than its cell, unless it scrolls in a box of its own;
- texts there: their contrast with what is behind them is at least 4.5 (WCAG AA);
- figures: as wide as their box at most, undistorted, with a background of their own, nothing cut off at their edge,
  letters of no less than 8 pixels, 5 in the narrow window, where fingers enlarge them.

A page with one fault of each kind is measured first: a measurement that overlooks its fault is an error.

Exit status: 0 without a fault; 1 with a list of faults (notebook, cell, what, where seen); 2 when the script cannot
measure. The screenshots, pieces of 1500 pixels, are for the eye.

Install: `pip install playwright`, and a Chromium: Debian's package chromium, or `playwright install chromium`. Formulas
need MathJax, which the pages load from the web; without it they stay as TeX. `--mathjax FOLDER` takes it from the
package of that name (npm pack mathjax@2.7.7) instead.
"""

import argparse
import base64
import contextlib
import io
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

import notebook_rules as rules  # noqa: E402

WIDTHS = {1280: 8, 400: 5}  # pixels of a window: the least pixels of a figure's letters (of 8.5 points) in it
THEMES, PIECE = ("light", "dark"), 1500
# Without these flags Chromium looks for updates, keeps a profile, and is slower where there is no GPU.
FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
MATHJAX = "**/mathjax/2.7.7/**"

MEASURE = r"""
(smallest) => {
  const faults = [];
  const cell = el => (el.closest('.jp-Cell')?.id || '').replace('cell-id=', '') || 'page';
  const say = (el, what) => faults.push([cell(el), what]);
  const shown = el => el.checkVisibility({visibilityProperty: true, opacityProperty: true});
  const words = el => `<${el.tagName.toLowerCase()}> ${JSON.stringify(el.textContent.trim().slice(0, 40))}`;

  for (const el of document.querySelectorAll('html, body, main, .jp-Notebook')) {
    if (el.scrollWidth > el.clientWidth + 1) say(el, `<${el.tagName.toLowerCase()}> scrolls sideways`);
  }

  const areas = [...document.querySelectorAll('.jp-OutputArea-output, .jp-RenderedMarkdown')];
  for (const area of areas) {
    // A box that scrolls shows its content, however wide (parts of a table don't scroll, whatever their style says);
    // a picture should be seen at once.
    const scrolls = el => ['auto', 'scroll'].includes(getComputedStyle(el).overflowX)
      && !getComputedStyle(el).display.startsWith('table');
    const edge = Math.min(area.getBoundingClientRect().right, area.closest('.jp-Cell').getBoundingClientRect().right);
    for (const el of area.querySelectorAll('*')) {
      if (!shown(el) || !el.getClientRects().length) continue;
      if (el.closest('.MathJax_Preview, .MJX_Assistive_MathML')) continue;
      let box = el.parentElement;
      const picture = ['IMG', 'SVG', 'CANVAS'].includes(el.tagName.toUpperCase());
      while (!picture && box !== area && !scrolls(box)) box = box.parentElement;
      const over = el.getBoundingClientRect().right - edge;
      if (over > 1 && (picture || !scrolls(box))) {
        say(el, `${words(el)} is ${Math.round(over)} px wider than its cell`);
        break;  // what it contains is too
      }
    }
  }

  // Colours: what is painted, from the element outwards, until something is opaque.
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const onto = (top, below, alpha) => [0, 1, 2].map(i => alpha * top[i] + (1 - alpha) * below[i]);
  const behind = el => {
    const layers = [];
    for (; el; el = el.parentElement) {
      const layer = rgba(getComputedStyle(el).backgroundColor);
      if (layer[3] > 0) layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => onto(layer, below, layer[3]), [255, 255, 255]);
  };
  const light = color => {
    const [r, g, b] = color.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const judged = new Set();
  for (const area of areas) {
    const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode());) {
      const el = text.parentElement, svg = el.closest('svg');
      if (!text.data.trim() || judged.has(el) || !shown(el) || el.closest('script, style')) continue;
      judged.add(el);
      const below = behind(svg || el);
      const top = rgba(svg ? getComputedStyle(el).fill : getComputedStyle(el).color);
      let opacity = top[3];
      for (let up = el; up; up = up.parentElement) opacity *= getComputedStyle(up).opacity;
      const found = contrast(onto(top, below, opacity), below);
      if (found < 4.5) say(el, `contrast ${found.toFixed(1)}: ${words(el)}`);
    }
  }

  for (const img of document.querySelectorAll('.jp-OutputArea-output img, .jp-RenderedMarkdown img')) {
    const {width, height} = img.getBoundingClientRect(), [w, h] = [img.naturalWidth, img.naturalHeight];
    if (!w || !h) { say(img, 'a picture that is not shown'); continue; }
    if (Math.abs(width / height * h / w - 1) > 0.02) say(img, `figure distorted: ${w}×${h} as ${width}×${height}`);
    const letters = 8.5 / 72 * 100 * width / w;  // figures are drawn with 100 pixels per inch
    const shrunk = `${Math.round(width)} of ${w} px`;
    if (letters < smallest) say(img, `figure shrunk to ${shrunk}: letters of ${letters.toFixed(1)} px`);
    const pixels = new OffscreenCanvas(w, h).getContext('2d');
    pixels.drawImage(img, 0, 0);
    const edges = [[0, 0, w, 1], [0, h - 1, w, 1], [0, 0, 1, h], [w - 1, 0, 1, h]];
    const ring = edges.flatMap(e => [...pixels.getImageData(...e).data]);
    const colors = new Set(ring.map((_, i) => i % 4 ? '' : ring.slice(i, i + 4).join()).filter(Boolean));
    const own = rgba(getComputedStyle(img).backgroundColor)[3] === 1;
    if (!own && ring.some((v, i) => i % 4 === 3 && v < 255)) say(img, 'figure without a background of its own');
    else if (colors.size > 1) say(img, 'figure with something cut off at its edge');
  }
  return faults;
}
"""


@contextlib.contextmanager
def chromium(file=None):
    """A headless browser: the given Chromium, one in PATH, or Playwright's. Raises RuntimeError if there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise RuntimeError("no playwright: pip install playwright") from None
    with sync_playwright() as playwright:
        try:
            # Without a sandbox, as it has to be in a container: it opens pages of this repository alone.
            browser = playwright.chromium.launch(
                executable_path=file or shutil.which("chromium"), args=FLAGS, chromium_sandbox=False
            )
        except Error as error:
            why = str(error).strip().splitlines()[0]
            install = "install Debian's package chromium, or: playwright install chromium"
            raise RuntimeError(f"no Chromium: {install} ({why})") from None
        try:
            yield browser
        except Error as error:
            raise RuntimeError(f"the browser could not go on: {error}") from None
        finally:
            browser.close()


def notebook(name):
    """The path of a notebook that was named as an argument."""
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name}: no such file")
    return Path(name)


def count(found):
    return f"{len(found) or 'no'} fault{'s' * (len(found) != 1)}"


def page_of(nb, theme):
    """The notebook as a page, as nbconvert makes it."""
    from nbconvert import HTMLExporter

    logging.getLogger("traitlets").setLevel(logging.ERROR)  # it warns of pictures without alternative text
    return HTMLExporter(theme=theme).from_notebook_node(nb)[0]


def faulty():
    """A notebook with one fault per cell, and {cell: words that name its fault}."""
    from matplotlib.figure import Figure

    def picture(figure, **options):
        file = io.BytesIO()
        figure.savefig(file, format="png", **options)
        return {"image/png": base64.b64encode(file.getvalue()).decode()}

    cut = Figure(figsize=(3, 2))
    cut.text(0.9, 0.5, "cut off")
    html = {
        "wide": ('<div style="width:3000px">wide</div>', "wider than its cell"),
        "squeezed": ('<div style="overflow:hidden"><table width="3000"><tr><td>cut</td></tr></table></div>', "wider"),
        "black": ('<b style="color:#111">black</b><b style="color:#eee">white</b>', "contrast"),
        "vector": ('<svg width="90" height="30"><text y="20">a</text><text fill="#fff">b</text></svg>', "contrast"),
        "faint": ('<b style="opacity:0.3">faint</b>', "contrast"),
    }
    png = {
        "clear": (picture(Figure(figsize=(3, 2)), transparent=True), "without a background"),
        "cut": (picture(cut), "cut off at its edge"),
        "large": (picture(Figure(figsize=(30, 2))), "letters"),
        "torn": ({"image/png": "AAAA"}, "not shown"),
    }
    outputs = {key: ({"text/html": data}, words) for key, (data, words) in html.items()} | png
    nb = nbformat.v4.new_notebook()
    for key, (data, _) in outputs.items():
        output = nbformat.v4.new_output("display_data", data)
        nb.cells.append(nbformat.v4.new_code_cell("1", id=key, outputs=[output], execution_count=1))
    flat = '<img src="data:image/png;base64,{}" style="width:90px;height:90px">'.format(png["cut"][0]["image/png"])
    nb.cells.append(nbformat.v4.new_markdown_cell(flat, id="flat"))
    nb.cells.append(nbformat.v4.new_markdown_cell("<p style='position:relative;left:2000px'>aside</p>", id="aside"))
    return nb, {key: words for key, (_, words) in outputs.items()} | {"flat": "distorted", "aside": "wider than its"}


def measured(browser, options, nb, name="", pictures=None, after=""):
    """{(cell, fault): [where it was seen]} of one notebook; writes screenshots into the folder `pictures`.

    after  HTML at the end of the page.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for theme in THEMES:
            file = Path(folder, f"{theme}.html")
            file.write_text(page_of(nb, theme).replace("</body>", after + "</body>"), encoding="utf-8")
            for width, smallest in WIDTHS.items():
                page = browser.new_page(viewport={"width": width, "height": PIECE}, color_scheme=theme)
                if options.mathjax:
                    page.route(MATHJAX, lambda route: from_folder(route, options.mathjax))
                page.goto(file.as_uri(), wait_until="load")
                if page.evaluate("typeof MathJax") != "undefined":
                    page.evaluate("new Promise(done => MathJax.Hub.Queue(() => done()))")
                elif name and "$" in rules.markdown_of(nb):
                    options.tex += [name] * (name not in options.tex)
                for cell, what in page.evaluate(MEASURE, smallest):
                    found.setdefault((cell, what), []).append(f"{width} {theme}")
                if pictures is not None:
                    height = page.evaluate("document.documentElement.scrollHeight")
                    for piece, y in enumerate(range(0, height, PIECE)):
                        page.evaluate(f"scrollTo(0, {y})")
                        page.screenshot(path=pictures / f"{name}-{width}-{theme}-{piece:02}.png")
                page.close()
    return found


def from_folder(route, folder):
    """Answers a page's request for a file of MathJax from a folder."""
    file = folder / route.request.url.split("/2.7.7/")[1].split("?")[0]
    route.fulfill(path=file, headers={"Access-Control-Allow-Origin": "*"})


def overlooked(browser, options):
    """The faults of the faulty page that are not found: what the measurements would miss."""
    nb, expected = faulty()
    found = measured(browser, options, nb, after='<p style="width:3000px">wide</p>')
    missing = [key for key, words in expected.items() if not any(c == key and words in what for c, what in found)]
    return missing + ["page"] * (not any("sideways" in what for _, what in found))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=notebook, help="default: all of notebooks/")
    parser.add_argument("--to", type=Path, metavar="FOLDER", default=REPO / "site" / "looks", help="for screenshots")
    parser.add_argument("--no-pictures", action="store_true", help="no screenshots")
    parser.add_argument("--chromium", metavar="FILE", help="default: chromium in PATH, else Playwright's own")
    parser.add_argument("--mathjax", type=Path, metavar="FOLDER", help="MathJax 2.7.7, for machines without the web")
    options = parser.parse_args(arguments)
    options.tex = []
    faults = 0
    try:
        with chromium(options.chromium) as browser:
            if missing := overlooked(browser, options):
                raise RuntimeError(f"the measurements overlook faults that were made on purpose: {', '.join(missing)}")
            pictures = None if options.no_pictures else options.to
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
            for path in options.notebooks or sorted((REPO / "notebooks").glob("*.ipynb")):
                found = measured(browser, options, rules.read(path), path.stem, pictures)
                faults += len(found)
                print(f"{path.name}: {count(found)}", flush=True)
                for (cell, what), where in found.items():
                    print(f"  {cell}: {what} [{', '.join(where)}]", flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if options.tex:
        print(f"MathJax was not loaded; formulas stayed as TeX in: {', '.join(options.tex)}")
    if pictures is not None:
        print(f"screenshots: {pictures}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
