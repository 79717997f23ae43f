"""The set-up cell as Colab runs it: the module google.colab, a listing of sessions on localhost, a bare git repository
in GitHub's place, a pip that writes down what it is asked for, and an empty folder to work in."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import notebook_rules as rules
import pytest

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
fetching = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("curl")), reason="the set-up cell calls git and curl in Colab"
)


def setup_cell(path=NOTEBOOKS[0]):
    """A notebook's set-up cell, with `target` alone in the place of the names that it imports from helpers."""
    source = rules.code_cells(rules.read(path))[0].source
    return re.sub(r"^from helpers import .*", "from helpers import target", source, flags=re.MULTILINE)


def test_all_notebooks_have_the_same_setup_cell_but_for_what_it_imports():
    assert {path.stem for path in NOTEBOOKS if setup_cell(path) != setup_cell()} == set()
    lines = setup_cell().splitlines()
    assert lines[-3:] == ["from helpers import target", "", "print(target.report())"]
    assert len(lines) <= rules.MAX_SETUP_LINES and max(map(len, lines)) <= 100


def test_the_setup_cell_names_no_real_address():
    assert re.findall(r"github\.com/[\w./-]+", setup_cell()) == ["github.com/OWNER/REPO"]
    assert rules.foreign_hosts(setup_cell()) == []


# --- a Colab of one's own ---------------------------------------------------------------------------------------------

# Runs cells as a kernel does, one after the other, and prints what Colab would show of an error.
KERNEL = """
import json, sys
import google.colab
names = {}
for cell in json.loads(sys.stdin.read()):
    try:
        exec(cell, names)
    except ImportError as error:
        print(f"{type(error).__name__}: {error}")
"""

# In pip's place: adds a line with what it was asked for to $PIP_LOG, then fails or writes the packages' metadata.
PIP = """
import json, os, re, sys
from pathlib import Path
asked = sys.argv[sys.argv.index("--constraint") + 1 :]
with open(os.environ["PIP_LOG"], "a") as log:
    log.write(json.dumps({"constraints": Path(asked[0]).read_text().split(), "install": asked[1:]}) + "\\n")
if os.environ.get("PIP_FAILS"):
    sys.exit("ERROR: No matching distribution found for " + asked[1])
for name, version in (line.split(">=") for line in asked[1:]):
    site = Path(__file__).parents[1]
    stem = name.replace("-", "_")  # as in a wheel
    old, new = next(site.glob(f"{stem}-*.dist-info"), None), site / f"{stem}-{version}.dist-info"
    old.rename(new) if old else new.mkdir()
    (new / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
"""

# Instead of helpers/__init__.py and target.py, for what needs neither torch nor cuDNN: 0.3 s instead of 5.
LIGHT = {
    "helpers/__init__.py": "from .target import target\n",
    "helpers/target.py": """
from pathlib import Path
from types import SimpleNamespace
from . import colab
colab.prepare()
target = SimpleNamespace(report=lambda: "helpers of " + (Path(__file__).parents[1] / "README.md").read_text())
""",
}


class Colab:
    """A machine that Colab lends: `open` a notebook on it and run its set-up cell."""

    def __init__(self, folder, port):
        self.site, self.github, self.work = folder / "site", folder / "github", folder / "content"
        self.log = folder / "pip.log"
        self.sessions = []
        (self.site / "google" / "colab").mkdir(parents=True)
        (self.site / "google" / "colab" / "__init__.py").touch()
        (self.site / "pip").mkdir()
        (self.site / "pip" / "__init__.py").touch()
        (self.site / "pip" / "__main__.py").write_text(PIP)
        self.work.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDNN_", "GIT_", "PIP_"))}
        self.environment |= {
            "PYTHONPATH": str(self.site),
            "PIP_LOG": str(self.log),
            "CUDA_VISIBLE_DEVICES": "",
            "no_proxy": "127.0.0.1",
            "COLAB_JUPYTER_IP": "127.0.0.1",
            "KMP_TARGET_PORT": str(port),
            # https://github.com/ stands for a local folder, and git knows of no other configuration.
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{self.github.as_uri()}/.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/",
        }

    def git(self, *arguments):
        identity = ("-c", "user.name=nobody", "-c", "user.email=", "-c", "init.defaultBranch=main")
        command = ["git", *identity, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, env=self.environment, cwd=self.work.parent)

    def publish(self, name, branches, light=True):
        """A bare repository OWNER/REPO with this series; in each branch, requirements.txt has lines of its own."""
        source = self.work.parent / "source"
        shutil.copytree(REPO / "helpers", source / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
        for path, text in LIGHT.items() if light else ():
            (source / path).write_text(text)
        self.git("init", "-q", source)
        for branch, lines in branches.items():
            (source / "README.md").write_text(f"{name} {branch}")
            (source / "requirements.txt").write_text((REPO / "requirements.txt").read_text() + "".join(lines))
            self.git("-C", source, "checkout", "-q", "-b", branch)
            self.git("-C", source, "add", "-A")
            self.git("-C", source, "commit", "-q", "-m", branch)
        self.git("clone", "-q", "--bare", source, self.github / name)
        shutil.rmtree(source)

    def open(self, path, kernel="k1"):
        """Opens what is at github.com/`path`, or the file in Drive with that id."""
        address = quote(f"https://github.com/{path}", safe="") if "/" in path else path
        session = {"id": f"s-{kernel}", "path": f"fileId={address}", "name": path.split("/")[-1], "type": "notebook"}
        self.sessions.append({**session, "kernel": {"id": kernel, "name": "python3"}})

    def run(self, *cells, kernel="k1", **environment):
        """Runs cells in a new kernel, by default the set-up cell. Returns what they print."""
        cells = cells or [setup_cell()]
        result = subprocess.run(
            [sys.executable, "-c", KERNEL, "-f", f"/runtime/kernel-{kernel}.json"],
            input=json.dumps(cells),
            env=self.environment | environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def installed(self):
        """What pip was asked to install, a list for each call."""
        return [json.loads(line)["install"] for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def colab(tmp_path):
    class Sessions(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/sessions" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(machine.sessions).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sessions) as server:
        machine = Colab(tmp_path, server.server_port)
        threading.Thread(target=server.serve_forever).start()
        yield machine
        server.shutdown()


# --- the address ------------------------------------------------------------------------------------------------------


@fetching
def test_the_whole_series_from_github_to_the_report(colab):
    """The real helpers: fetched, what is missing installed with torch pinned, imported, reported."""
    colab.publish("OWNER/REPO", {"main": ["not-there>=1.5\n"]}, light=False)
    colab.open("OWNER/REPO/blob/main/notebooks/01_fused_conv_bias_relu.ipynb")
    output = colab.run()
    assert "Installing not-there>=1.5: once for this machine" in output
    assert re.fullmatch(r"No GPU; recorded target: NVIDIA H200 .*", output.splitlines()[-1])
    pip = json.loads(colab.log.read_text())
    assert pip["install"] == ["not-there>=1.5"]
    assert f"torch=={metadata.version('torch')}" in pip["constraints"]
    assert (colab.work / "github.com/OWNER/REPO/main/helpers/target.py").is_file()


@fetching
def test_a_branch_with_slashes_and_its_own_requirements(colab):
    colab.publish("OWNER/REPO", {"main": ["of-main>=1.0\n"], "topic/notebooks/new": ["of-topic>=2.0\n"]})
    colab.open("OWNER/REPO/blob/topic/notebooks/new/notebooks/01_fused_conv_bias_relu.ipynb")
    assert colab.run().splitlines()[-1] == "helpers of OWNER/REPO topic/notebooks/new"
    assert colab.installed() == [["of-topic>=2.0"]]


@fetching
def test_a_tag_is_fetched_like_a_branch(colab):
    colab.publish("OWNER/REPO", {"main": []})
    colab.git("-C", colab.github / "OWNER/REPO", "tag", "v1")
    colab.open("OWNER/REPO/blob/v1/notebooks/00_five_steps.ipynb")
    assert colab.run().endswith("helpers of OWNER/REPO main\n")  # after what git says of a checkout without a branch


@fetching
def test_of_several_sessions_this_kernels(colab):
    for fork in ("OWNER/REPO", "OTHER/FORK", "blob/blob"):
        colab.publish(fork, {"main": []})
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb", kernel="k1")
    colab.open("OTHER/FORK/blob/main/notebooks/00_five_steps.ipynb", kernel="k2")
    colab.open("blob/blob/blob/main/notebooks/00_five_steps.ipynb", kernel="k3")
    assert colab.run(kernel="k2") == "helpers of OTHER/FORK main\n"
    assert colab.run(kernel="k3") == "helpers of blob/blob main\n"
    assert colab.run(kernel="k1") == "helpers of OWNER/REPO main\n"


@fetching
def test_the_only_session_is_taken_whatever_its_kernel(colab):
    """Should Colab start its kernels in another way one day."""
    colab.publish("OWNER/REPO", {"main": []})
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb", kernel="k1")
    assert colab.run(kernel="another") == "helpers of OWNER/REPO main\n"


NOT_FOUND = "ImportError: no helpers: !git clone https://github.com/OWNER/REPO or set CUDNN_NOTEBOOKS\n"


@fetching
def test_a_copy_in_drive_says_what_to_do_and_one_line_does_it(colab):
    colab.publish("OWNER/REPO", {"main": [], "topic": []})
    colab.open("1ZAqQEIxR08eODSPEHvKPwbZoioVdV8L9")
    assert colab.run() == NOT_FOUND
    git, *arguments = re.search(r"!(git clone \S+)", NOT_FOUND)[1].split()
    colab.git(*arguments, "-b", "topic", colab.work / "REPO")
    assert git == "git" and colab.run() == "helpers of OWNER/REPO topic\n"


@fetching
def test_what_was_cloned_by_hand_is_used_without_another_try(colab):
    """A private repository, for example, which the set-up cell can't fetch."""
    colab.publish("OWNER/REPO", {"main": []})
    colab.open("OTHER/PRIVATE/blob/main/notebooks/00_five_steps.ipynb")
    assert colab.run().endswith(NOT_FOUND)
    colab.git("clone", "https://github.com/OWNER/REPO", colab.work / "any-name")
    assert colab.run() == "helpers of OWNER/REPO main\n"


@fetching
def test_a_folder_by_hand(colab, tmp_path):
    """CUDNN_NOTEBOOKS works as elsewhere, for example with a copy in a mounted Drive."""
    colab.publish("OWNER/REPO", {"main": []})
    colab.git("clone", "-q", "https://github.com/OWNER/REPO", tmp_path / "drive")
    colab.open("1ZAqQEIxR08eODSPEHvKPwbZoioVdV8L9")
    assert colab.run(CUDNN_NOTEBOOKS=str(tmp_path / "drive")) == "helpers of OWNER/REPO main\n"


@fetching
def test_without_sessions_or_without_their_server(colab):
    assert colab.run() == NOT_FOUND
    assert colab.run(KMP_TARGET_PORT="1") == NOT_FOUND
    assert colab.run(COLAB_JUPYTER_IP="", KMP_TARGET_PORT="") == NOT_FOUND


@fetching
def test_a_repository_that_git_cannot_reach_shows_what_git_says(colab):
    """A private or removed repository, or no network: git's message, then what to do; and the next run tries again."""
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    said = colab.run()
    assert "fatal: " in said and "OWNER/REPO" in said and said.endswith(NOT_FOUND)
    colab.publish("OWNER/REPO", {"main": []})
    assert colab.run() == "helpers of OWNER/REPO main\n"


@fetching
def test_a_branch_that_is_gone_shows_what_git_says(colab):
    colab.publish("OWNER/REPO", {"main": []})
    colab.open("OWNER/REPO/blob/gone/notebooks/00_five_steps.ipynb")
    assert "Remote branch gone not found" in colab.run()


@fetching
def test_without_git(colab, tmp_path):
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "curl").symlink_to(shutil.which("curl"))
    output = colab.run(PATH=str(tmp_path / "bin"))
    assert "git: " in output and "not found" in output and output.endswith(NOT_FOUND)


# --- again ------------------------------------------------------------------------------------------------------------


@fetching
def test_nothing_is_fetched_or_installed_twice(colab):
    """Not by the same cell again, nor by a second notebook on the machine, nor after the branch has moved on."""
    colab.publish("OWNER/REPO", {"main": ["not-there>=1.5\n"]})
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    colab.open("OWNER/REPO/blob/main/notebooks/02_autotuning.ipynb", kernel="k2")
    first = colab.run(setup_cell(), setup_cell())
    assert first.count("Installing") == 1 and first.count("helpers of OWNER/REPO main\n") == 2
    shutil.rmtree(colab.github)  # whoever asks for it now fails
    assert colab.run(kernel="k1") == colab.run(kernel="k2") == "helpers of OWNER/REPO main\n"
    assert colab.installed() == [["not-there>=1.5"]]


@fetching
def test_another_branch_on_the_same_machine(colab):
    """Its own helpers, and of its requirements only what the first branch did not install."""
    colab.publish("OWNER/REPO", {"main": ["not-there>=1.5\n"], "topic": ["not-there>=1.2\n", "of-topic>=2.0\n"]})
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    colab.open("OWNER/REPO/blob/topic/notebooks/00_five_steps.ipynb", kernel="k2")
    assert colab.run().splitlines()[-1] == "helpers of OWNER/REPO main"
    assert colab.run(kernel="k2").splitlines()[-1] == "helpers of OWNER/REPO topic"
    assert colab.run() == "helpers of OWNER/REPO main\n"
    assert colab.installed() == [["not-there>=1.5"], ["of-topic>=2.0"]]


# --- pip --------------------------------------------------------------------------------------------------------------


@fetching
def test_a_failing_pip_is_shown_and_tried_again(colab):
    colab.publish("OWNER/REPO", {"main": ["not-there>=1.5\n"]})
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    output = colab.run(PIP_FAILS="1")
    assert "ERROR: No matching distribution found for not-there>=1.5" in output
    assert "SetupError: pip could not install not-there>=1.5" in output
    assert "!pip install 'not-there>=1.5'" in output and "helpers of" not in output
    assert colab.run().endswith("helpers of OWNER/REPO main\n")


@fetching
def test_an_imported_package_that_pip_replaced_asks_for_a_restart(colab):
    """The new kernel after it goes on."""
    colab.publish("OWNER/REPO", {"main": ["outdated>=2.0\n"]})
    (colab.site / "outdated_module.py").touch()
    (colab.site / "outdated-1.0.dist-info").mkdir()
    for file, text in {"METADATA": "Name: outdated\nVersion: 1.0\n", "top_level.txt": "outdated_module\n"}.items():
        (colab.site / "outdated-1.0.dist-info" / file).write_text(text)
    colab.open("OWNER/REPO/blob/main/notebooks/00_five_steps.ipynb")
    output = colab.run("import outdated_module", setup_cell())
    assert "SetupError: pip replaced outdated_module" in output and "Restart session" in output
    assert "helpers of" not in output
    assert colab.run("import outdated_module", setup_cell()) == "helpers of OWNER/REPO main\n"


@pytest.fixture
def versions(module, monkeypatch, tmp_path):
    """versions(**found): what helpers.colab takes for installed; returns that module, with its own requirements.txt."""

    def install(found, requirements=None):
        colab = module("colab")
        monkeypatch.setattr(colab, "version_of", found.get)
        if requirements is not None:
            (tmp_path / "requirements.txt").write_text(requirements)
            monkeypatch.setattr(colab, "REQUIREMENTS", tmp_path / "requirements.txt")
        return colab

    return install


# What Colab had in June 2026, by the lists that it publishes for its machines with and without a GPU.
WITH_GPU = {"torch": "2.11.0+cu128", "numpy": "2.0.2", "matplotlib": "3.10.0", "nvidia-cudnn-cu12": "9.19.0.56"}
WITHOUT_GPU = {"torch": "2.11.0+cpu", "numpy": "2.0.2", "matplotlib": "3.10.0"}


def test_what_colabs_machines_lack(versions):
    """The frontend; without a GPU also cuDNN itself, which PyTorch's CPU build does not bring."""
    assert versions(WITH_GPU).missing() == ["nvidia-cudnn-frontend>=1.32"]
    *first, cudnn, nvrtc = versions(WITHOUT_GPU).missing()
    assert first == ["nvidia-cudnn-frontend>=1.32"]
    assert cudnn.startswith("nvidia-cudnn-cu13>=9.") and nvrtc.startswith("nvidia-cuda-nvrtc>=")
    added = {"nvidia-cudnn-frontend": "1.32.0", "nvidia-cudnn-cu13": "9.28.1.4", "nvidia-cuda-nvrtc": "13.5.37"}
    assert versions(WITHOUT_GPU | added).missing() == []


def test_what_is_not_for_colab_is_in_the_requirements(module):
    names = {line.split(">=")[0] for line in (REPO / "requirements.txt").read_text().splitlines()}
    assert names > module("colab").NOT_IN_COLAB


def test_an_old_torch_stays_and_an_absent_one_is_installed(versions, capsys):
    lines = "# a comment\n\ntorch>=2.11  # with CUDA\nnumpy>=2.0\n"
    assert versions({"torch": "2.9.0+cu128", "numpy": "1.26.4"}, lines).missing() == ["numpy>=2.0"]
    printed = capsys.readouterr().out
    assert "torch 2.9.0+cu128 stays, although torch>=2.11 is asked for" in printed and "runtime type" in printed
    assert versions({"numpy": "2.0.2"}, lines).missing() == ["torch>=2.11"]
    assert versions({"torch": "2.12.0a0+git123", "numpy": "2.3.0rc1"}, lines).missing() == []
    assert capsys.readouterr().out == ""


def test_torchs_cuda_packages_are_pinned_with_it(versions, monkeypatch):
    requires = {
        "torch": [
            "filelock",
            "nvidia-cudnn-cu12==9.19.0.56; platform_system == 'Linux'",
            "cuda-toolkit[nvrtc]==12.8.1",
        ],
        "cuda-toolkit": ['nvidia-cuda-nvrtc-cu12==12.8.*; extra == "nvrtc"', 'nvidia-npp-cu12; extra == "npp"'],
        "nvidia-cudnn-cu12": ["nvidia-cublas-cu12"],
        "nvidia-cublas-cu12": ["nvidia-cudnn-cu12"],  # a circle ends
    }
    found = {**WITH_GPU, "filelock": "3", "cuda-toolkit": "12.8.1", "nvidia-cuda-nvrtc-cu12": "12.8.93"}
    colab = versions(found | {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-frontend": "1.20"})
    monkeypatch.setattr(colab.metadata, "requires", requires.get)
    assert colab.torch_packages() == {
        "torch": "2.11.0+cu128",
        "cuda-toolkit": "12.8.1",
        "nvidia-cuda-nvrtc-cu12": "12.8.93",
        "nvidia-cudnn-cu12": "9.19.0.56",
        "nvidia-cublas-cu12": "12.8.4.1",
    }


def test_elsewhere_nothing_happens(module, monkeypatch):
    monkeypatch.setattr(module("colab"), "missing", lambda: pytest.fail("looked for missing packages"))
    assert "google.colab" not in sys.modules
    module("colab").prepare()
