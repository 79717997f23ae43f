"""Under nbval, cells that need what this machine lacks are skipped, and a verdict must have run."""

import pytest
from helpers import target
from helpers.needs import skip_reason
from nbval.plugin import IPyNbCell
from notebook_rules import required_sm, verdict_cells


def pytest_itemcollected(item):
    if not isinstance(item, IPyNbCell):
        return
    reason = skip_reason(item.cell.source)
    if reason:
        item.add_marker(pytest.mark.skip(reason=reason))
    if "stderr" not in item.parent.skip_compare:  # a warning of some library is no other verdict
        item.parent.skip_compare += ("stderr",)


class VerdictsRan(pytest.Item):
    """Fails where no verdict cell of a notebook ran, unless the notebook asks for a newer GPU."""

    def runtest(self):
        needs = f"sm{required_sm(self.parent.nb)}"
        if not any(cell.test_outputs is not None for cell in self.cells):
            if target.lacks(needs):
                pytest.skip(target.lacks(needs))
            pytest.fail(
                f"none of the {len(self.cells)} verdict cells ran, so nothing was checked",
                pytrace=False,
            )

    def reportinfo(self):
        return self.path, None, f"{self.path.name}: a verdict cell ran"


def pytest_collection_modifyitems(items):
    for notebook in dict.fromkeys(item.parent for item in items if isinstance(item, IPyNbCell)):
        cells = [item for item in items if item.parent is notebook]
        if len(cells) < sum(cell.cell_type == "code" for cell in notebook.nb.cells):
            continue  # single cells were asked for
        verdicts = [
            item for item in cells if any(item.cell is cell for cell in verdict_cells(notebook.nb))
        ]
        last = VerdictsRan.from_parent(notebook, name="a verdict cell ran")
        last.cells = verdicts
        items.insert(items.index(cells[-1]) + 1, last)
