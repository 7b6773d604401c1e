"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const cells = [...document.querySelectorAll(".dear-map button")];
  const panel = document.getElementById("panel");
  const make = (name, text, parent, attributes = {}) => {
    const node = document.createElement(name);
    if (text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  };
  const drawMap = (canvas, digits) => {
    const side = data.side;
    canvas.width = canvas.height = side;
    const pen = canvas.getContext("2d");
    for (let place = 0; place < digits.length; place++) {
      // What the head does not look at is darkened.
      pen.fillStyle = `rgba(12, 14, 24, ${0.68 * (1 - Math.sqrt(Number(digits[place]) / 9))})`;
      pen.fillRect(place % side, Math.floor(place / side), 1, 1);
    }
  };
  const strip = (title, seen, parent) => {
    const part = make("div", null, parent);
    make("h3", title, part);
    const row = make("div", null, part, { class: "strip" });
    for (const [image, score, digits] of seen) {
      const figure = make("figure", null, row);
      const size = { src: data.thumbnails[image], width: 104, height: 104 };
      make("img", null, make("div", null, figure, { class: "frame" }), { ...size, alt: data.names[image] });
      const frame = make("div", null, figure, { class: "frame" });
      make("img", null, frame, { ...size, alt: "" });
      drawMap(make("canvas", null, frame, { role: "img", "aria-label": "where it looks" }), digits);
      make("figcaption", `${data.names[image]} (${score > 0 ? "+" : ""}${score.toFixed(2)})`, figure);
    }
  };
  const show = (cell) => {
    for (const other of cells) {
      other.setAttribute("aria-pressed", String(other === cell));
      other.tabIndex = other === cell ? 0 : -1;
    }
    const head = data.heads[cell.dataset.head];
    panel.replaceChildren();
    make("h3", `Layer ${head.layer}, head ${head.head}: ${head.title}`, panel);
    make("p", head.meaning, panel);
    const facts = [];
    if (head.entropy !== null) facts.push(`Concept Entropy ${head.entropy.toFixed(2)} bits`);
    if (head.phrases.length && head.explained !== null) facts.push(`its phrases explain ${(100 * head.explained).toFixed(0)}% of its variance`);
    if (facts.length) make("p", facts.join("; "), panel, { class: "soft" });
    for (const [concept, share, color] of head.shares) {
      const bar = make("div", null, panel, { class: "bar" });
      make("span", concept, bar);
      const level = make("span", null, bar);
      make("i", null, level, { style: `width:${100 * share}%;background:${color}` });
      make("span", `${(100 * share).toFixed(0)}%`, bar);
    }
    if (head.phrases.length) {
      make("h3", head.entropy === null ? "Its phrases" : "Its phrases, the strongest first", panel);
      const list = make("ol", null, panel);
      for (const phrase of head.phrases) make("li", phrase, list);
    }
    if (head.most) {
      const along = head.along === null ? "its strongest direction" : `“${head.along}”`;
      const pair = make("div", null, panel, { class: "two" });
      strip(`Images it pushes most toward ${along}`, head.most, pair);
      strip("Images it pushes away from it", head.least, pair);
      make("p", "Below each image: where the head looks; the rest is dark.", panel, { class: "soft" });
    }
  };
  const width = Number(document.querySelector(".dear-map table").dataset.heads);
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width };
  cells.forEach((cell, place) => {
    cell.addEventListener("click", () => show(cell));
    cell.addEventListener("keydown", (event) => {
      let next = null;
      if (event.key in moves) next = place + moves[event.key];
      else if (event.key === "Home") next = place - (place % width);
      else if (event.key === "End") next = place - (place % width) + width - 1;
      if (next !== null && cells[next]) {
        event.preventDefault();
        cells[next].focus();
        show(cells[next]);
      }
    });
  });
  const linked = document.querySelector(`.dear-map button[data-head="${CSS.escape(location.hash.slice(1))}"]`);
  show(linked || cells[0]);
})();
