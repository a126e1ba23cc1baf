"""A figure's SVG file → the same as parts of a page: small, in the page's colours, its panels one by one.

A page stacks the panels where it is narrow. What a file of matplotlib says again and again is said once: styles become
classes, and groups and ids that nothing refers to go.
"""

import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element, fromstring, tostring

from markupsafe import Markup

from biphase.style import GRID, INK

XLINK = "{http://www.w3.org/1999/xlink}"
SUPERFLUOUS = re.compile(
    r"font-family: [^;]*;? ?|stroke-linejoin: miter;? ?|(?<=[0-9]\.[0-9])[0-9]+|rotate\(-?0 [^)]*\)"
)
"""What the page says for all its pictures, digits beyond the first, and turns by nothing."""

REFERENCE = re.compile(r"(?<=url\(#)[\w-]+|(?<=href=#)[\w-]+")
"""An id that an attribute names."""

PANEL_TITLE, PANEL_LABELS, PANEL_END, CHARACTER_WIDTH = 18.0, 32.0, 12.0, 5.4
"""The room of a panel's title above its axes, of the labels below, and of half a label at the end, and the width of a
character."""


def inline_svg(text: str, name: str, styles: dict[str, str]) -> Markup:
    """A picture in one part, or as a legend and a part for each of several panels.

    `styles`: what pictures of the page look like → the name of that class; new ones are added.
    """
    root = fromstring(text[text.index("<svg") :])
    tidy(root, name, styles)
    parts = []
    for kind, box, content in cut_panels(root):
        part = Element("svg", {"class": kind, "viewBox": box})
        if kind == "legend":
            part.set("width", f"{1.5 * float(box.split()[2]):.0f}")
        part[:] = content
        dissolve_groups(part)
        parts.append(tostring(part, encoding="unicode").replace(" />", "/>"))
    return Markup("".join(parts))


def tidy(root: Element, name: str, styles: dict[str, str]) -> None:
    """Leave out what a page says for all its pictures; give ids and colours of the page."""
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    values = " ".join(f"{key}={value}" for one in root.iter() for key, value in one.attrib.items())
    ids = {own: f"{name}-{number}" for number, own in enumerate(dict.fromkeys(REFERENCE.findall(values)))}
    for one in root.iter():
        one.tag = one.tag.partition("}")[2] or one.tag
        one.text, one.tail = one.text if (one.text or "").strip() else None, None
        kept = {}
        for key, value in one.attrib.items():
            key = key.removeprefix(XLINK)
            value = SUPERFLUOUS.sub("", " ".join(value.split()))
            value = REFERENCE.sub(lambda found: ids[found[0]], f"{key}={value}").removeprefix(f"{key}=")
            if key == "style":
                value = value.replace(INK, "currentColor").replace(GRID, "var(--grid)")
                key, value = "class", styles.setdefault(value, f"s{len(styles)}")
            elif key == "id":
                value = ids.get(value, value if value.startswith(("axes_", "legend_")) else "")
            if value:
                kept[key] = value
        one.attrib = kept


def cut_panels(root: Element) -> Iterator[tuple[str, str, list[Element]]]:
    """The legend of a figure of several panels and each of these, or all of another picture: what kind of part it is,
    its `viewBox`, and what is drawn there."""
    named = [
        (one.attrib.pop("id"), one) for one in root.iter("g") if one.get("id", "").startswith(("axes_", "legend_"))
    ]
    panels = [one for own, one in named if own.startswith("axes_") and next(one.iter("path"), None) is not None]
    if len(panels) < 2:
        yield "whole", root.get("viewBox", ""), [*root]
        return
    of_figure, shared = [*root.iterfind("g/g")], [*root.iterfind("defs")]  # ids are those of the page
    legends = [one for own, one in named if own.startswith("legend_") and one in of_figure and any(one.itertext())]
    # The first path of a panel is the frame of its axes: M left bottom L right bottom L right top ...
    frames = []
    for panel in panels:
        frame = next(panel.iter("path")).attrib["d"]
        frames.append([float(number) for number in re.findall(r"[0-9.]+", frame)[:6]])
    margin, top = frames[0][0], frames[0][5] - PANEL_TITLE
    for legend in legends:
        texts = [(float(one.attrib["x"]), len(one.text or "")) for one in legend.iter("text")]
        begin = min(x for x, _ in texts) - 30
        yield (
            "legend",
            f"{begin:.0f} 0 {max(x + CHARACTER_WIDTH * num for x, num in texts) - begin:.0f} {top:.0f}",
            [legend],
        )
    for panel, (left, bottom, right, _, _, upper) in zip(panels, frames, strict=True):
        size = f"{right - left + margin + PANEL_END:.0f} {bottom - upper + PANEL_TITLE + PANEL_LABELS:.0f}"
        yield "panel", f"{left - margin:.0f} {upper - PANEL_TITLE:.0f} {size}", [*shared, panel]
        shared = []


def dissolve_groups(node: Element) -> None:
    """Put what stands in groups without attributes in their place."""
    for child in node:
        dissolve_groups(child)
    node[:] = [inner for child in node for inner in (child if child.tag == "g" and not child.attrib else [child])]
