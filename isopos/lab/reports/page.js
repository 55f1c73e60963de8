const number = text => parseFloat(text.replace(/[,()%]/g, ""));
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falling = head.ariaSort === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = row => row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [number(key(a)), number(key(b))];
      if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
      return (falling ? -1 : 1) * (isNaN(x) ? key(a).localeCompare(key(b)) : x - y);
    });
    body.append(...rows);
  }));
}
for (const box of document.querySelectorAll(".switches input")) {
  const belongs = line => line.id.startsWith("curve-" + box.value + "-seed");
  const lines = [...document.querySelectorAll("[id^='curve-']")].filter(belongs);
  const show = () => lines.forEach(line => line.style.display = box.checked ? "" : "none");
  box.addEventListener("change", show);
  show();
}
