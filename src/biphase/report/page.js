"use strict";
// A click (or Enter, or the space bar) on a header sorts its table: one way, the other way, then in the original order.
// Empty cells stay last. A cell sorts by its number (610M and 40 % count as numbers); in a column of numbers, by the
// first number in its text; otherwise by its text. A minus sign may be a hyphen or U+2212.
const UNITS = { k: 1e3, m: 1e6, b: 1e9 };
const valueOf = (cell) => {
  const text = (cell.dataset.value ?? cell.textContent).replaceAll(",", "").replaceAll("−", "-");
  const clock = text.match(/^(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?$/);
  if (text && clock) return 3600 * (clock[1] ?? 0) + 60 * (clock[2] ?? 0) + Number(clock[3] ?? 0);
  const [, number, unit] = text.match(/^(-?[0-9.]+(?:e[+-]?[0-9]+)?)([kmb]?)( %)?$/i) ?? [];
  if (number) return number * (UNITS[unit.toLowerCase()] ?? 1);
  if (cell.classList.contains("num")) return text.match(/-?[0-9]+([.][0-9]+)?/)?.[0] ?? "";
  return text === "–" ? "" : text;
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];

  const compare = (a, b, sign) => {
    const [x, y] = [a, b].map(valueOf);
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
  };

  headers.forEach((header, column) => {
    // The first click puts the largest number first, or the first word of the alphabet.
    const cycle = header.classList.contains("stub") ? ["none", "ascending", "descending"] : ["none", "descending", "ascending"];
    header.querySelector("button")?.addEventListener("click", () => {
      const order = cycle[(cycle.indexOf(header.getAttribute("aria-sort")) + 1) % 3];
      for (const other of headers) other.setAttribute("aria-sort", other === header ? order : "none");
      table.classList.toggle("is-sorted", order !== "none");
      const sign = { none: 0, ascending: 1, descending: -1 }[order];
      body.append(...[...original].sort((a, b) => sign && compare(a.cells[column], b.cells[column], sign)));
    });
  });
}

// Open all details before printing, and close them again afterwards.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
