// Tables of sentences are stacked on small screens (site.css); tables of numbers scroll.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const names = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => cell.textContent);
  const cells = [...table.querySelectorAll("tbody td")];
  const room = Math.min(table.clientWidth, table.closest("article").clientWidth);
  if ((names.length < 3 && table.scrollWidth <= room + 1) || !cells.some((cell) => cell.textContent.length > 40)) continue;
  table.dataset.stacks = "";
  for (const cell of cells) cell.dataset.name = names[cell.cellIndex];
}
// Options and names do not break at their hyphens.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.textContent.length < 16) code.style.whiteSpace = "nowrap";
}
