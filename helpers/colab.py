"""In Colab: installs what the notebooks need and its machine lacks, and leaves the rest as it is. Elsewhere: nothing.

The set-up cell has fetched the repository by then. target.py calls `prepare` before anything imports torch or cudnn.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from .libcudnn import CPU_BUILD_LACKS, SetupError, version_of

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
# Colab is a Jupyter of its own, with parts that the package jupyter would replace, and nobody runs the tests there.
NOT_IN_COLAB = {"jupyter", "nbval", "pytest"}


def prepare():
    """Installs what is missing, where this process is a Colab notebook's.

    PyTorch and the CUDA packages that it requires are never replaced. Raises SetupError where pip fails, with pip's
    messages printed before it, and where pip replaced a package that this process had already imported.
    """
    if "google.colab" not in sys.modules:
        return
    needed = missing()
    if not needed:
        return
    print(f"Installing {', '.join(needed)}: once for this machine, it takes a while", flush=True)
    before = installed()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in torch_packages().items())
        constraints.flush()
        options = ["--quiet", "--disable-pip-version-check", "--root-user-action", "ignore"]
        pip = [sys.executable, "-m", "pip", "install", *options, "--constraint", constraints.name, *needed]
        result = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    print(result.stdout, end="")
    if result.returncode:
        raise SetupError(
            f"pip could not install {', '.join(needed)}; what it said is printed above. Run this cell again, or in a "
            f"cell of its own: !pip install {' '.join(map(repr, needed))}"
        )
    importlib.invalidate_caches()
    after = installed()
    stale = imported({name for name, version in before.items() if after.get(name) != version})
    if stale:
        raise SetupError(
            f"pip replaced {', '.join(stale)}, which this session had already imported: "
            "choose Runtime > Restart session, then run this cell again"
        )


def missing():
    """The lines of requirements.txt that the installed packages don't meet, as a list; [] where all is there.

    An installed torch counts as met, whatever its version; a line is printed where it is older than asked for.
    """
    from packaging.requirements import Requirement

    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    torch = version_of("torch")
    if torch and torch.endswith("+cpu"):
        lines += CPU_BUILD_LACKS
    needed = []
    for requirement in (Requirement(line) for line in lines if line):
        found = version_of(requirement.name)
        if requirement.name in NOT_IN_COLAB or (found and requirement.specifier.contains(found, prereleases=True)):
            continue
        if requirement.name == "torch" and found:
            print(
                f"torch {found} stays, although {requirement} is asked for: if what follows fails, choose the latest "
                "version under Runtime > Change runtime type"
            )
            continue
        needed.append(str(requirement))
    return needed


def torch_packages():
    """{name: version} of torch and of the CUDA packages that it requires, directly or not, as far as installed."""
    from packaging.requirements import Requirement

    names, found = ["torch"], {}
    while names:
        name = names.pop()
        if name not in found and version_of(name):
            found[name] = version_of(name)
            required = (Requirement(line).name for line in metadata.requires(name) or ())
            names += [other for other in required if re.match("nvidia-|cuda-|triton", other)]
    return found


def installed():
    """{name: version} of all installed packages; of two with one name, the one that Python finds first."""
    found = {}
    for package in metadata.distributions():
        found.setdefault(package.metadata["Name"], package.version)
    return found


def imported(packages):
    """Names of the imported top-level modules that belong to these packages, sorted."""
    owners = metadata.packages_distributions().items()
    return sorted(module for module, names in owners if module in sys.modules and packages & set(names))
