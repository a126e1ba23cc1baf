"use strict";
// Tables sort by a click (or Enter, or the space bar) on a header: up, down, then as they were. Empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];

  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const isNumber = !isNaN(a) && !isNaN(b);
    return isNumber ? a - b : a.localeCompare(b);
  };

  headers.forEach((header, column) => {
    header.querySelector("button").addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" };
      const first = header.classList.contains("stub") ? { none: "ascending", ascending: "descending", descending: "none" } : next;
      const order = first[header.getAttribute("aria-sort")];
      for (const other of headers) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", order);
      table.classList.toggle("is-sorted", order !== "none");
      const value = (row) => row.cells[column].dataset.sort;
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...original];
      if (order !== "none") {
        rows.sort((a, b) => {
          const isEmpty = value(a) === "" || value(b) === "";
          return compare(value(a), value(b)) * (isEmpty ? 1 : sign);
        });
      }
      body.append(...rows);
    });
  });
}

// Print shows everything; what was folded is folded again afterwards.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
