"use strict";
const token = new URLSearchParams(location.search).get("token") || "";
const tab = Math.random().toString(36).slice(2);
const keys = "123456789abdefhijklmopqrstvwxyz"; // c, g, n and u have other meanings
const $ = (id) => document.getElementById(id);
let state = null, mode = "one", busy = false;

function element(name, text, attributes = {}) {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
const image = (place, side, alt) =>
  element("img", "", { src: `image?place=${place}&side=${side}&token=${encodeURIComponent(token)}`, alt });
const percent = (value) => `${Math.round(100 * value)}%`;

async function call(path, body) {
  if (busy) return;
  busy = true;
  try {
    const address = `${path}?token=${encodeURIComponent(token)}` + (body ? "" : `&tab=${tab}&mode=${mode}`);
    const options = body ? { method: "POST", body: JSON.stringify({ tab, mode, ...body }) } : {};
    const response = await fetch(address, options);
    const answer = await response.json();
    $("error").hidden = response.ok;
    if (!response.ok) { $("error").textContent = answer.error; return; }
    state = answer;
    show();
  } catch (error) {
    $("error").hidden = false;
    $("error").textContent = "The program does not answer. Start it again: every answer so far is on disk.";
  } finally { busy = false; }
}

function places() {
  if (!state || !state.item) return [];
  if (state.mode !== "group") return [state.item.place];
  return [...document.querySelectorAll(".label-group button[aria-pressed=true]")].map((node) => Number(node.dataset.place));
}
const answer = (kind, label = "") => { const rows = places(); if (rows.length) call("answer", { places: rows, kind, label }); };

function show() {
  const question = $("question"), item = state.item;
  question.replaceChildren();
  document.querySelectorAll("[data-mode]").forEach((node) => node.setAttribute("aria-current", node.dataset.mode === mode));
  $("suspects").textContent = state.suspects ? `(${state.suspects})` : "";
  $("progress").textContent = `${state.labels} of ${state.images} labeled, ${state.none} none of these, ${state.skipped} skipped` +
    (state.training ? "; training …" : "");
  if (!item) question.append(element("p", state.mode === "check" ? "No label looks wrong." : state.mode === "group"
    ? "No group of similar images yet: label some one by one." : "Every image has an answer."));
  else if (state.mode === "group") {
    question.append(element("p", `All of these: ${item.label}? Click on those that are not.`, { dir: "auto" }));
    const grid = element("div", "", { class: "label-group" });
    for (const one of item.images) {
      const button = element("button", "", { type: "button", "aria-pressed": "true", "data-place": one.place, title: `${one.path} (${percent(one.confidence)})` });
      button.append(image(one.place, 224, one.path));
      button.onclick = () => button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      grid.append(button);
    }
    const confirm = element("button", "", { type: "button", id: "confirm" });
    confirm.append("Confirm ", element("bdi", item.label), " ", element("kbd", "enter"));
    confirm.onclick = () => answer("label", item.label);
    question.append(grid, confirm);
  } else {
    const row = element("div", "", { class: "label-one" }), text = element("div");
    row.append(image(item.place, 640, item.path), text);
    if (item.label) {
      text.append(element("p", `Labeled ${item.label}; looks like ${item.guesses[0][0]} (${percent(item.guesses[0][1])}).`, { dir: "auto" }));
      const fine = element("button", "Checked, this label is fine ", { type: "button", id: "fine" });
      fine.append(element("kbd", "enter"));
      fine.onclick = () => answer("checked");
      text.append(fine);
    } else if (item.guesses.length) {
      const list = element("div", "", { class: "label-classes", id: "guesses" });
      item.guesses.forEach(([name, value], number) => {
        const button = element("button", "", { type: "button" });
        if (!number) button.append(element("kbd", "enter"), " ");
        button.append(element("bdi", name), ` ${percent(value)}`);
        button.onclick = () => answer("label", name);
        list.append(button);
      });
      text.append(element("p", "The model's guess:"), list);
    }
    text.append(element("p", item.path, { class: "soft" }));
    question.append(row);
  }
  const best = item && item.guesses && item.guesses.length ? item.guesses[0][0] : item && item.label;
  $("choices").replaceChildren(...state.classes.map((one, number) => {
    const button = element("button", "", { type: "button", class: one.name === best ? "guess" : "" });
    if (keys[number]) button.append(element("kbd", keys[number]), " ");
    button.append(element("bdi", one.name), ` ${one.labels}`);
    button.dataset.name = one.name.toLocaleLowerCase();
    button.onclick = () => answer("label", one.name);
    return button;
  }));
  $("find").hidden = state.classes.length <= keys.length; // otherwise every class has a key
  filter();
  const forecast = state.forecast;
  $("accuracy").textContent = forecast ? `Cross-validated accuracy: ${percent(forecast.accuracy)} (90% interval ` +
    `${percent(forecast.low)} to ${percent(forecast.high)}, ${forecast.images} labeled images).` : "";
  $("advice").textContent = forecast ? forecast.advice : state.training ? "" : "Label more images, two or more of every class, to see how accurate the model is.";
  $("command").textContent = state.command;
}

function filter() { // shows the classes whose names contain what was typed
  const part = $("class-part").value.trim().toLocaleLowerCase();
  for (const button of $("choices").children) button.hidden = !button.dataset.name.includes(part);
}
function setMode(value) { mode = value; call("state"); }
document.querySelectorAll("[data-mode]").forEach((node) => { node.onclick = () => setMode(node.dataset.mode); });
$("none").onclick = () => answer("none");
$("skip").onclick = () => answer("skip");
$("undo").onclick = () => { mode = "one"; call("undo", {}); };
$("new-class").onsubmit = (event) => {
  event.preventDefault();
  const name = $("class-name").value.trim();
  const place = state && state.mode === "one" && state.item ? state.item.place : null;
  if (name) call("class", { name, place }).then(() => { if ($("error").hidden) { $("class-name").value = ""; $("class-name").blur(); } });
};
$("class-part").oninput = filter;
$("class-part").onkeydown = (event) => {
  if (event.key !== "Enter" && event.key !== "Escape") return;
  const shown = [...$("choices").children].filter((button) => !button.hidden);
  const first = shown.find((button) => button.dataset.name === event.target.value.trim().toLocaleLowerCase()) || shown[0];
  if (event.key === "Enter" && !first) return;
  if (event.key === "Enter" && event.target.value.trim()) first.click();
  event.target.value = "";
  event.target.blur();
  filter();
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state) return;
  if (event.target.tagName === "INPUT") { if (event.key === "Escape") event.target.blur(); return; }
  const onButton = event.target.tagName === "BUTTON" && (event.key === " " || event.key === "Enter");
  if (onButton) return;
  const key = event.key.toLowerCase(), number = keys.indexOf(key);
  if (key === "n") { event.preventDefault(); $("class-name").focus(); }
  else if (key === "/") { event.preventDefault(); $("class-part").focus(); }
  else if (key === "g") setMode(mode === "group" ? "one" : "group");
  else if (key === "c") setMode(mode === "check" ? "one" : "check");
  else if (key === "u" || key === "backspace") $("undo").click();
  else if (key === "0") answer("none");
  else if (key === " ") { event.preventDefault(); answer("skip"); }
  else if (key === "enter") {
    if (state.mode === "group" && state.item) answer("label", state.item.label);
    else if (state.mode === "check") answer("checked");
    else if (state.item && state.item.guesses.length) answer("label", state.item.guesses[0][0]);
  } else if (key.length === 1 && number >= 0 && number < state.classes.length) answer("label", state.classes[number].name);
});
setInterval(() => { if (state && state.training && !busy && state.mode === "one" && !document.hidden) refresh(); }, 2000);
async function refresh() { // figures alone: the image stays
  const place = state.item ? `&place=${state.item.place}` : "";
  const response = await fetch(`state?token=${encodeURIComponent(token)}&tab=${tab}&mode=one${place}`).catch(() => null);
  if (!response || !response.ok || busy) return;
  const item = state.item, answer = await response.json();
  state = { ...answer, item };
  show();
}
call("state");
