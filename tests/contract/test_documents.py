"""Pages generated from the code are current, and what pages refer to exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_configuration_reference_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run: make docs"


def anchor(heading: str) -> str:
    """Return the anchor of a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def prose_of(page: Path) -> str:
    """Return the page without code blocks, whose comments look like headings."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", prose_of(target), re.MULTILINE)
            assert heading in map(anchor, headings), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "package", ["router", "router/text", "router/text/calls", "engine/kernels/gpu", "tests/pretend_gpu", "tests/ptx"]
)
def test_packages_list_their_files(package: str) -> None:
    listed = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert listed is not None
    words = set(re.findall(r"\w+", listed))
    there = {path.stem for path in (ROOT / package).glob("*.py")}
    assert there - words == {"__init__"}


def groups_of(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {group["name"]: group["rules"] for group in document["groups"]}


ALERTS = groups_of(yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()))
PODS_ALERTS = groups_of(
    yaml.safe_load((ROOT / "deploy" / "k8s" / "components" / "monitoring" / "alerts.yaml").read_text())["spec"]
)


def test_operations_say_what_to_do_about_each_alert() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    for rules in (ALERTS | PODS_ALERTS).values():
        for rule in rules:
            assert f"| {rule['alert']} |" in operations, f"what to do about {rule['alert']}?"


def test_alerts_notice_what_is_absent_and_not_what_never_was() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in ALERTS["tandem"]}
    assert expressions["TandemNoRouter"] == "absent(tandem:workers)", "a comparison with nothing is silent"
    assert re.search(
        r'== 0\s+and .*max_over_time\(tandem:workers\{role="prefill"\}\[1d\]\)\) > 0',
        expressions["TandemNoPrefillWorker"],
    ), "without prefill workers by intent there is nothing to say"


def test_kubernetes_has_the_same_alerts() -> None:
    """The alerts are written twice, because kustomize reads no file above its folder."""
    assert ALERTS.items() <= PODS_ALERTS.items()
