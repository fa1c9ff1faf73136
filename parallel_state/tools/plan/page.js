"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const drawing = document.getElementById("drawing"), panel = document.getElementById("panel");
const field = document.getElementById("number"), buttons = [...document.querySelectorAll("button[data-kind]")];
const cells = Array.from({length: data.world}, (_, rank) => draw(rank));          // in the order of ranks
const rankOf = new Map(cells.map((cell, rank) => [cell, rank]));
let kind = data.kinds.find(each => each.names.includes(data.chosen));
let shown = 0, held = false, highlighted = [];

// Appends a rank's cell to the box of its node, which the node's first rank makes.
function draw(rank) {
  if (rank % data.perNode === 0) {
    const box = add(drawing, "div", undefined, "node"), fewest = Math.ceil(Math.sqrt(data.perNode));
    let columns = fewest;
    while (data.perNode % columns) columns++;
    box.style.setProperty("--columns", columns > 2 * fewest ? fewest : columns);  // 4 for 8 GPUs, 9 for 72
    add(box, "small", `node ${rank / data.perNode}`);
  }
  const cell = add(drawing.lastChild, "div");
  add(cell, "small", rank);
  add(cell, "b");
  return cell;
}

function digits(rank, grid) {
  return grid.map(([name, size]) => {
    const digit = rank % size;
    rank = Math.floor(rank / size);
    return [name, size, digit];
  });
}

// The digits of the kind's axes are the place in the group, the other digits the group's number: both in mixed radix.
function locate(rank, kind) {
  let group = 0, place = 0, groups = 1, places = 1;
  for (const [name, size, digit] of digits(rank, data.grids[kind.grid])) {
    if (kind.axes.includes(name)) { place += digit * places; places *= size; }
    else { group += digit * groups; groups *= size; }
  }
  if (kind.places) { place = kind.places.indexOf(place); if (place < 0) group = -1; }
  if (kind.parts) { group = kind.parts[group][Math.floor(place / kind.size)]; place %= kind.size; }
  return {group, place};
}

function members(group, kind) {
  if (!kind.byGroup) {
    kind.byGroup = new Map();
    for (let rank = 0; rank < data.world; rank++) {
      const found = locate(rank, kind).group;
      if (found >= 0) kind.byGroup.has(found) ? kind.byGroup.get(found).push(rank) : kind.byGroup.set(found, [rank]);
    }
  }
  return kind.byGroup.get(group) || [];
}

function shorten(words) {
  return words.length <= 4 ? words.join(" ") : [...words.slice(0, 3), "…", words[words.length - 1]].join(" ");
}

function abbreviate(ranks) {                                    // same as groups.abbreviate
  if (ranks.length < 3) return ranks.join(" ");
  const step = ranks[1] - ranks[0];
  let run = 2;
  while (run < ranks.length && ranks[run] - ranks[run - 1] === step) run++;
  const span = part => step === 1 ? `${part[0]}–${part[part.length - 1]}`
                                  : `${part[0]}:${part[part.length - 1] + step}:${step}`;
  if (run === ranks.length) return step === 1 ? span(ranks) : shorten(ranks);
  const runs = [];
  for (let start = 0; start < ranks.length; start += run) runs.push(ranks.slice(start, start + run));
  const alike = part => part.length === run && part.every((rank, place) => rank - part[0] === ranks[place] - ranks[0]);
  return runs.every(alike) ? shorten(runs.map(span)) : shorten(ranks);
}

function add(parent, tag, text, className) {
  const element = parent.appendChild(document.createElement(tag));
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function recolor() {
  cells.forEach((cell, rank) => {
    const group = locate(rank, kind).group;
    cell.className = `gpu ${group < 0 ? "none" : "c" + group % data.colors}`;
    const told = group < 0 ? `in no ${kind.names[0]} group` : `${kind.names[0]} group ${group}`;
    cell.title = `rank ${rank}: node ${Math.floor(rank / data.perNode)}, GPU ${rank % data.perNode}, ${told}`;
    cell.setAttribute("aria-label", cell.title);
    cell.lastChild.textContent = group < 0 ? "–" : group;
  });
  buttons.forEach(button => button.setAttribute("aria-pressed", data.kinds[button.dataset.kind] === kind));
  document.getElementById("shows").textContent = kind.shows;
}

function highlight(rank) {
  highlighted.forEach(each => cells[each].classList.remove("on", "me"));
  highlighted = [...members(locate(rank, kind).group, kind), rank];
  highlighted.forEach(each => cells[each].classList.add("on"));
  cells[rank].classList.add("me");
  drawing.classList.add("chosen");
}

function pipeline(rank) {
  const pp = data.kinds.find(each => each.names.includes("pp"));
  if (!pp) return "the only stage";
  const {group, place} = locate(rank, pp), stages = members(group, pp);
  return `stage ${place} of ${stages.length}: ` + (place ? `previous rank ${stages[place - 1]}` : "the first") +
    (place + 1 < stages.length ? `, next rank ${stages[place + 1]}` : ", the last");
}

function describe(rank) {
  panel.textContent = "";
  const facts = add(panel, "dl");
  const coordinates = new Map();
  for (const grid of data.grids)
    for (const [name, , digit] of digits(rank, grid))
      if (data.axes.includes(name) && !coordinates.has(name)) coordinates.set(name, digit);
  for (const [term, text] of [
    ["place", `node ${Math.floor(rank / data.perNode)}, GPU ${rank % data.perNode}`], ["pipeline", pipeline(rank)],
    ["coordinates", [...coordinates].map(([name, digit]) => `${name}=${digit}`).join("  ") || "one rank"],
  ]) { add(facts, "dt", term); add(facts, "dd", text); }
  const table = add(panel, "table"), head = add(add(table, "thead"), "tr");
  for (const text of ["group", "number", "its rank"]) add(head, "th", text).scope = "col";
  const body = add(table, "tbody");
  for (const each of data.kinds) {
    const {group, place} = locate(rank, each), chosen = each === kind ? "chosen" : "";
    const row = add(body, "tr", undefined, chosen), names = add(row, "td");
    add(names, "span", each.names[0]);
    if (each.names.length > 1) add(names, "small", " = " + each.names.slice(1).join(" = "));
    add(row, "td", group < 0 ? "–" : group);
    add(row, "td", group < 0 ? "–" : `${place} of ${each.size}`);
    const ranks = add(add(body, "tr", undefined, "ranks " + chosen), "td",
                      group < 0 ? "not in a group" : abbreviate(members(group, each)));
    ranks.colSpan = 3;
  }
}

function show(rank) {
  if (rank !== shown) cells[shown].setAttribute("tabindex", "-1");   // removing it from the focused cell would unfocus it
  shown = rank;
  cells[rank].setAttribute("tabindex", "0");
  if (document.activeElement !== field) field.value = rank;
  describe(rank);
  highlight(rank);
}

function choose(next) { kind = next; recolor(); describe(shown); if (highlighted.length) highlight(shown); }

function letGo() {
  held = false;
  highlighted.forEach(each => cells[each].classList.remove("on", "me"));
  highlighted = [];
  drawing.classList.remove("chosen");
}

// Returns the rank of the nearest cell in a direction, also in another node; at the border of the drawing the same rank.
function neighbour(rank, right, down) {
  const from = cells[rank].getBoundingClientRect();
  let next = rank, least = Infinity;
  cells.forEach((cell, other) => {
    const box = cell.getBoundingClientRect(), x = box.x - from.x, y = box.y - from.y;
    const ahead = x * right + y * down, distance = ahead + 4 * Math.abs(x * down + y * right);
    if (ahead > 1 && distance < least) [next, least] = [other, distance];
  });
  return next;
}

const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
const cellOf = event => event.target.closest && event.target.closest(".gpu");
drawing.classList.add(data.world <= 128 ? "large" : data.world <= 2048 ? "medium" : "small");
drawing.addEventListener("pointerover", event => {
  const cell = cellOf(event);
  if (cell && !held) show(rankOf.get(cell));
});
drawing.addEventListener("pointerleave", () => { if (!held && !drawing.contains(document.activeElement)) letGo(); });
document.addEventListener("focusin", event => { const cell = cellOf(event); if (cell) show(rankOf.get(cell)); });
drawing.addEventListener("click", event => {
  const cell = cellOf(event);
  if (!cell) return letGo();
  const rank = rankOf.get(cell), again = held && rank === shown;
  show(rank);
  held = !again;
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") return letGo();
  if (!cellOf(event)) return;
  if (steps[event.key]) { event.preventDefault(); held = false; cells[neighbour(shown, ...steps[event.key])].focus(); }
  else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); held = !held; }
});
buttons.forEach(button => button.addEventListener("click", () => choose(data.kinds[button.dataset.kind])));
field.addEventListener("input", () => {
  if (field.value !== "" && field.checkValidity()) { show(Number(field.value)); held = true; }
});
document.getElementById("find").addEventListener("submit", event => event.preventDefault());
cells.forEach(cell => { cell.setAttribute("role", "button"); cell.setAttribute("tabindex", "-1"); });
recolor();
show(0);
letGo();
