"""Puts the sections of a report together."""

from __future__ import annotations

from benchmarks.report.curves import Known, draw_curves
from benchmarks.report.groups import Group, make_groups
from benchmarks.report.material import Material
from benchmarks.report.page import Report
from benchmarks.report.pictures import Link, Section
from mpiddp.schedules.registry import names
from mpiddp.schedules.schedule import Collective

ORDER = (
    *(each.value for each in Collective), "point-to-point", "reduction",
)  # fmt: skip


def assemble(material: Material) -> Report:
    known = Known(lambda place, size: None, "")
    groups: dict[str, list[Group]] = {}
    for group in make_groups(material.cells):
        if group.place.quantity != "all-pairs":
            groups.setdefault(group.place.quantity, []).append(group)
    sections = []
    for quantity in sorted(groups, key=lambda name: (name not in ORDER, name)):
        found = draw_curves(groups[quantity], known)
        sections.append(
            Section(
                name=quantity.replace(" ", "-"),
                heading=quantity.capitalize(),
                words=", ".join(found.common),
                pictures=[found.winners] if found.winners else [],
                panels=found.panels,
                links=list_links(groups[quantity]),
            )
        )
    return Report(
        heading="Measurements", words=f"{len(material.cells):,} cells", alerts=[],
        sections=sections, machines=[], records=material.names,
    )


def list_links(groups: list[Group]) -> list[Link]:
    """One for each algorithm that ran, if the collective can be explained."""
    quantity = groups[0].place.quantity
    if quantity not in {each.value for each in Collective}:
        return []
    ran = dict.fromkeys(
        str(each.cell.details.get("ran") or "").partition(":")[0]
        for group in groups
        for row in group.rows.values()
        for each in row.values()
    )
    return [Link(quantity, name, 4) for name in ran if name in names()]
