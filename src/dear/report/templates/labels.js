"use strict";
(() => {
  const save = document.getElementById("save");
  if (!save) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const summary = document.getElementById("summary");
  const rows = [...document.querySelectorAll(".labels li")];
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function decisions() {
    const changed = new Map(), dropped = new Set();
    for (const row of rows) {
      const index = Number(row.dataset.index);
      const choice = row.querySelector("input:checked").value;
      if (choice === "drop") dropped.add(index);
      const label = Number(row.querySelector("select").value);
      if (choice === "change" && label !== data.labels[index]) changed.set(index, label);
    }
    return { changed, dropped };
  }

  function table() {
    const { changed, dropped } = decisions();
    const lines = ["path,label,classname,split"];
    data.paths.forEach((path, index) => {
      if (dropped.has(index)) return;
      const label = changed.has(index) ? changed.get(index) : data.labels[index];
      lines.push(`${quoted(path)},${label},${quoted(data.classes[label])},${data.splits[index]}`);
    });
    return lines.join("\n") + "\n";
  }

  document.addEventListener("change", (event) => {
    const row = event.target.closest(".labels li");
    if (row && event.target.tagName === "SELECT") row.querySelector("input[value=change]").checked = true;
    const { changed, dropped } = decisions();
    summary.textContent = `${changed.size} changed, ${dropped.size} dropped.`;
  });
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
    link.download = "corrected.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
