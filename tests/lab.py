"""Runs the notebooks in JupyterLab, in a browser, as a reader does: open, Run > Run All Cells, read.

    python tests/lab.py                                    all notebooks
    python tests/lab.py notebooks/04_sdpa.ipynb            these
    python tests/lab.py --to FOLDER                        also a screenshot of each figure, table and skipped cell

JupyterLab works on a temporary copy of the repository, with settings of its own: nothing stored is changed. Chromium
opens each notebook, clears the stored outputs and runs all cells. Compared with what the notebook stores:

- every cell runs, without an error and without a word on stderr;
- every verdict cell prints its stored verdict;
- cells that store a figure or a table show one, no wider than their place (a table may scroll in a box of its own);
- a cell that needs what this machine lacks shows the one line of %%needs, and no other cell does;
- solutions are folded.

With a GPU and without one. Without, on two cores, a notebook takes half a minute to three minutes. A notebook with one
fault of each kind runs first: a check that overlooks its fault is an error.

Exit status: 0 without a fault; 1 with a list of faults (notebook, cell, what); 2 when the script cannot run.

Install: requirements.txt, which brings JupyterLab, `pip install playwright`, and a Chromium: Debian's package chromium,
or `playwright install chromium`.
"""

import argparse
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import looks  # noqa: E402
import notebook_rules as rules  # noqa: E402

START_S, NOTEBOOK_S, QUIET_S = 60, 1200, 5
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # else cells out of sight are not in the page
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
PANEL = "const panel = jupyterapp.shell.currentWidget, cells = panel?.content.widgets ?? [];"
OPENED = PANEL + "return cells.length > 0 && panel.sessionContext.session?.kernel?.status === 'idle';"
STATE = (
    PANEL
    + """
const code = cells.filter(cell => cell.model.type === 'code');
return [panel.sessionContext.session?.kernel?.status, code.filter(c => c.model.executionCount === null).length];
"""
)
SEEN = (
    PANEL
    + """
const shown = el => el.checkVisibility() && el.getBoundingClientRect().height > 0;
const right = el => el.getBoundingClientRect().right;
const fits = el => {
  for (let box = el.parentElement; !box.matches('.jp-Cell'); box = box.parentElement) {
    const style = getComputedStyle(box);
    const scrolls = ['auto', 'scroll'].includes(style.overflowX) && !style.display.startsWith('table');
    if (scrolls && el.tagName !== 'IMG') el = box;  // what scrolls may be wide
    else if (style.overflowX !== 'visible' && right(el) > right(box) + 1) return false;
  }
  return right(el) <= right(el.closest('.jp-Cell')) + 1;
};
return Object.fromEntries(cells.filter(cell => cell.model.type === 'code').map(cell => {
  const all = (query) => [...cell.node.querySelectorAll('.jp-OutputArea-output ' + query)].filter(shown);
  const texts = [...cell.node.querySelectorAll('.jp-OutputArea-output')].filter(shown).map(el => el.innerText);
  const figures = all('img').filter(img => img.naturalWidth > 0), tables = all('table');
  return [cell.model.id, {
    count: cell.model.executionCount,
    outputs: cell.model.outputs.toJSON(),
    text: texts.join('\\n').trim(),
    figures: figures.length,
    tables: tables.length,
    wide: [...figures, ...tables].filter(el => !fits(el)).length,
    folded: cell.inputHidden,
  }];
}));
"""
)


def function(body):
    return f"() => {{ {body} }}"


class Lab:
    """A JupyterLab over a temporary copy of the repository, while the context lasts."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="lab")
        self.root = Path(self.folder.name, "repository")
        ignore = shutil.ignore_patterns(".*", "__pycache__", "site")
        shutil.copytree(REPO, self.root, ignore=ignore)
        own = {name: Path(self.folder.name, name) for name in ("config", "runtime", "settings", "workspaces")}
        for name, text in SETTINGS.items():
            file = own["settings"] / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.token = f"http://127.0.0.1:{port}", secrets.token_hex(16)
        options = [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}"]
        options += [f"--ServerApp.root_dir={self.root}", "--no-browser", "--allow-root", "--expose-app-in-browser"]
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(own["config"]),
            "JUPYTER_RUNTIME_DIR": str(own["runtime"]),
            "JUPYTERLAB_SETTINGS_DIR": str(own["settings"]),
            "JUPYTERLAB_WORKSPACES_DIR": str(own["workspaces"]),
        }
        self.log = Path(self.folder.name, "log")
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "jupyterlab", *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.root)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self):
        request = urllib.request.Request(f"{self.url}/api/status", headers={"Authorization": f"token {self.token}"})
        until = time.monotonic() + START_S
        while True:
            try:
                return urllib.request.urlopen(request, timeout=5).close()
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > until:
                    last = "\n".join(self.log.read_text().splitlines()[-8:])
                    raise RuntimeError(f"JupyterLab did not start:\n{last}") from None
                time.sleep(0.2)

    def __exit__(self, *_):
        self.process.terminate()  # and with it the kernels
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def executed(lab, browser, path, pictures=None):
    """{cell: what is seen} after all cells of the notebook at `path` have run; screenshots go into `pictures`."""
    shutil.copyfile(path, lab.root / "notebooks" / path.name)
    page = browser.new_page(viewport={"width": 1280, "height": 1500})
    page.goto(f"{lab.url}/lab/tree/notebooks/{path.name}?reset&token={lab.token}")
    page.wait_for_function("typeof jupyterapp !== 'undefined'", timeout=START_S * 1000)
    page.wait_for_function(function(OPENED), timeout=START_S * 1000)
    page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-item", has_text=re.compile("^Run All Cells$")).click()
    until, quiet, before = time.monotonic() + NOTEBOOK_S, None, None
    while time.monotonic() < until:
        status, waiting = state = page.evaluate(function(STATE))
        if state != before or status != "idle":
            quiet, before = time.monotonic(), state
        # After an error the cells below never run: quiet for some seconds is the end, too.
        if status == "idle" and (not waiting or time.monotonic() - quiet > QUIET_S):
            break
        time.sleep(0.3)
    page.wait_for_timeout(500)  # what came last is drawn
    seen = page.evaluate(function(SEEN))
    for cell, found in seen.items() if pictures is not None else ():
        if found["figures"] or found["tables"] or found["text"].startswith("Skipped:"):
            index = f"jupyterapp.shell.currentWidget.content.widgets.find(c => c.model.id === {cell!r}).node"
            page.evaluate_handle(index).as_element().screenshot(path=pictures / f"{path.stem}-{cell}.png")
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    return seen


def faults_of(nb, seen, skip_reason):
    """[(cell, what is wrong)] of a notebook and what was seen of it."""
    found = []
    for cell in rules.code_cells(nb):
        here, stored = seen.get(cell.id), cell.get("outputs", [])
        if here is None or here["count"] is None:
            found.append((cell.id, "did not run" if here else "is not in the page"))
            continue
        for output in here["outputs"]:
            if output["output_type"] == "error":
                found.append((cell.id, f"{output['ename']}: {output['evalue'][:200]}"))
            elif output.get("name") == "stderr":
                found.append((cell.id, f"on stderr: {''.join(output['text'])[:200]!r}"))
        if rules.SOLUTION in rules.tags(cell) and not here["folded"]:
            found.append((cell.id, "the solution is not folded"))
        if here["wide"]:
            found.append((cell.id, "a figure or table is cut off at the right"))
        reason, line = skip_reason(cell.source), here["text"].startswith("Skipped: needs")
        if reason and not (line and reason in here["text"] and "\n" not in here["text"]):
            found.append((cell.id, f"does not say in one line 'Skipped: {reason}', but {here['text'][:80]!r}"))
        if line and not reason:
            found.append((cell.id, f"skipped, although this machine has what it needs: {here['text']!r}"))
        if reason or line:
            continue
        if cell in rules.verdict_cells(nb):
            verdict = "".join(o.get("text", "") for o in stored).strip()
            if "PASS" not in here["text"] or ("PASS" in verdict and verdict != here["text"]):
                found.append((cell.id, f"verdict {here['text'][:80]!r}, stored is {verdict[:80]!r}"))
        data = [o.get("data", {}) for o in stored]
        for kind, there, what in (("image/png", "figures", "figure"), ("text/html", "tables", "table")):
            if any(kind in d for d in data) and not here[there]:
                found.append((cell.id, f"shows no {what}"))
    return found


def faulty():
    """A notebook with one fault per cell, and {cell: words that name its fault}."""
    output, stream = nbformat.v4.new_output, {"output_type": "stream", "name": "stdout"}
    verdict = [nbformat.from_dict({**stream, "text": "result: PASS\n"})]
    stored = {kind: [output("display_data", {kind: "stored"})] for kind in ("image/png", "text/html")}
    wide = '<div style="overflow:hidden"><table><td style="min-width:3000px">wide</td></table></div>'
    cells = [  # id, source, tags, stored outputs, words
        ("error", "1 / 0", ["raises-exception"], [], "ZeroDivisionError"),
        ("stderr", "import sys\nprint('careful', file=sys.stderr)", [], [], "on stderr"),
        ("verdict", "print('result: FAIL')", [rules.CHECKED], verdict, "verdict 'result: FAIL'"),
        ("other", "print('other: PASS')", [rules.CHECKED], verdict, "verdict 'other: PASS'"),
        ("figure", "1", [], stored["image/png"], "no figure"),
        ("table", "1", [], stored["text/html"], "no table"),
        ("wide", f"from IPython.display import HTML\nHTML({wide!r})", [], [], "cut off"),
        ("silent", "# lacks a thing\nprint('x')", [], [], "does not say in one line"),
        ("skipped", "print('Skipped: needs a GPU.')", [], [], "although"),
        ("solution", "1", [rules.SOLUTION], [], "not folded"),
        ("stop", "1 / 0", [], [], "ZeroDivisionError"),
        ("late", "1", [], [], "did not run"),
    ]
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": dict(rules.KERNELSPEC)})
    for key, source, tags, outputs, _ in cells:
        cell = nbformat.v4.new_code_cell(source, id=key, outputs=outputs, execution_count=1, metadata={"tags": tags})
        nb.cells.append(cell)
    return nb, {key: words for key, *_, words in cells} | {"gone": "is not in the page"}


def overlooked(lab, browser):
    """The cells of the faulty notebook whose fault is not found."""
    nb, expected = faulty()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "faulty.ipynb")
        nbformat.write(nb, path)
        seen = executed(lab, browser, path)
    nb.cells.append(nbformat.v4.new_code_cell("1", id="gone"))
    found = faults_of(nb, seen, lambda source: "a thing" if source.startswith("# lacks") else "")
    return [key for key, words in expected.items() if not any(c == key and words in what for c, what in found)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=looks.notebook, help="default: all of notebooks/")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="for screenshots; none without it")
    parser.add_argument("--chromium", metavar="FILE", help="default: chromium in PATH, else Playwright's own")
    options = parser.parse_args(arguments)
    from helpers.needs import skip_reason

    if options.to is not None:
        options.to.mkdir(parents=True, exist_ok=True)
    faults = 0
    try:
        with looks.chromium(options.chromium) as browser, Lab() as lab:
            if missing := overlooked(lab, browser):
                raise RuntimeError(f"the checks overlook faults that were made on purpose: {', '.join(missing)}")
            for path in options.notebooks or sorted((REPO / "notebooks").glob("*.ipynb")):
                nb, started = rules.read(path), time.monotonic()
                seen = executed(lab, browser, path, options.to)
                found = faults_of(nb, seen, skip_reason)
                skipped = sum(here["text"].startswith("Skipped:") for here in seen.values())
                figures, tables = (sum(here[kind] for here in seen.values()) for kind in ("figures", "tables"))
                verdicts = sum("PASS" in seen.get(c.id, {"text": ""})["text"] for c in rules.verdict_cells(nb))
                if not verdicts:
                    found.append(("page", "no verdict cell passed"))
                faults += len(found)
                summary = (
                    f"{len(seen)} cells, {skipped} skipped, {verdicts} verdicts, {figures} figures, {tables} tables"
                )
                print(f"{path.name}: {looks.count(found)} ({summary}; {time.monotonic() - started:.0f} s)", flush=True)
                for cell, what in found:
                    print(f"  {cell}: {what}", flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
