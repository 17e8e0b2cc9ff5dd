"use strict";
// The page where people rank, and the page with progress. Texts of models reach the page as text nodes only.

const LONG = 2500; // characters; a longer text is collapsed
const $ = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function ordinal(n) {
  const ending = n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th";
  return n + ending;
}

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer.");
  }
  if (response.ok) return response.json();
  const text = await response.text();
  if (response.status === 403) {
    throw new Error("The server was started again. Open the address that burnish label printed last.");
  }
  let reason = text;
  try { reason = JSON.parse(text).error; } catch { /* not JSON */ }
  throw new Error(reason || `The server answered ${response.status}.`);
}

function complain(message) {
  $("alert").textContent = message;
  $("alert").hidden = !message;
  if (message) $("alert").scrollIntoView({ block: "nearest" });
}

let quiet = 0;
function announce(message, seen = true) {
  const status = $("status");
  status.textContent = message;
  status.classList.toggle("quiet", !message || !seen);
  clearTimeout(quiet);
  quiet = setTimeout(() => status.classList.add("quiet"), 2500);
}

// --- the ranking -------------------------------------------------------------------------------------------------

let state = null; // what the server sent
let cards = []; // one for each completion, in the order shown: { card, rank, list, texts, open, marks }
let groups = []; // the ranking, best first: lists of tied completions
let selected = 0;
let filledIn = -1; // the completion that has just got the last rank because no other was left
let busy = false;

const hasKeys = !window.matchMedia("(hover: none)").matches; // else it is a phone
const isPair = () => cards.length === 2;
const groupOf = (i) => groups.findIndex((group) => group.includes(i));
const unranked = () => cards.map((_, i) => i).filter((i) => groupOf(i) < 0);
const inOrder = () => (isPair() ? [0, 1] : [...groups.flat(), ...unranked()]);

function take(i) {
  groups = groups.map((group) => group.filter((other) => other !== i)).filter((group) => group.length);
}

function rankNext(i) {
  if (i === filledIn && !unranked().length) { // people who press every number also press the last one
    filledIn = -1;
    return select(i);
  }
  if (isPair()) groups = [[i], [1 - i]];
  else if (!unranked().length) groups = [[i]];
  else if (groupOf(i) >= 0) take(i);
  else groups.push([i]);
  const [last, ...others] = unranked();
  const fills = groupOf(i) >= 0 && last !== undefined && !others.length;
  if (fills) groups.push([last]);
  select(i);
  filledIn = fills ? last : -1;
  changed();
}

function rankRest() {
  for (const i of unranked()) groups.push([i]);
}

function move(i, by) {
  rankRest();
  const at = groupOf(i);
  const alone = groups[at].length === 1;
  take(i);
  groups.splice(Math.max(0, alone ? at + by : by < 0 ? at : at + 1), 0, [i]);
  select(i);
  changed();
}

function dropAt(i, place) {
  rankRest();
  take(i);
  const flat = groups.flat();
  const before = place > 0 ? groupOf(flat[place - 1]) : -1;
  const after = place < flat.length ? groupOf(flat[place]) : groups.length;
  if (before === after) groups[before].push(i);
  else groups.splice(before + 1, 0, [i]);
  select(i);
  changed();
}

function tie() {
  const i = selected;
  if (isPair()) groups = groups.length === 1 ? [] : [[0, 1]];
  else {
    const at = groupOf(i);
    if (at >= 0 && groups[at].length > 1) {
      take(i);
      groups.splice(at + 1, 0, [i]);
    } else if (at === 0 || (at < 0 && !groups.length)) {
      return announce("There is no completion above to tie with");
    } else {
      const above = at < 0 ? groups.length - 1 : at - 1;
      take(i);
      groups[above].push(i);
      if (unranked().length === 1) groups.push(unranked());
    }
  }
  changed();
}

function rankOf(i) {
  const at = groupOf(i);
  if (at < 0) return "";
  if (isPair()) return groups.length === 1 ? "Tie" : at ? "Worse" : "Better";
  return (groups[at].length > 1 ? "=" : "") + ordinal(at + 1);
}

function changed() {
  draw();
  const left = unranked().length;
  const said = inOrder().filter((i) => groupOf(i) >= 0).map((i) => `completion ${i + 1} ${rankOf(i).replace("=", "tied ")}`);
  announce((said.length ? said.join(", ") : "Nothing is ranked") + (left && said.length ? `; ${left} left` : ""), false);
}

function draw() {
  const focused = document.activeElement;
  const items = inOrder().map((i) => cards[i].list);
  if (items.some((item, place) => $("cards").children[place] !== item)) {
    const [inside, current] = [$("cards").contains(focused), selected];
    $("cards").append(...items); // which takes the focus away
    if (inside) (focused.matches(".card") ? cards[current].card : focused).focus({ preventScroll: true });
    selected = current;
  }
  cards.forEach(({ card, rank }, i) => {
    const shown = rankOf(i);
    card.classList.toggle("ranked", shown !== "" && shown !== "Worse");
    card.classList.toggle("selected", i === selected);
    card.tabIndex = i === selected ? 0 : -1;
    rank.textContent = shown || (isPair() ? "Choose" : "Rank");
    rank.setAttribute("aria-label", shown ? `Completion ${i + 1}: ${shown.replace("=", "tied ")}` : `${rank.textContent} completion ${i + 1}`);
  });
  const left = unranked().length;
  const how = !hasKeys ? (isPair() ? "" : "Tap Rank on them from best to worst, or drag them.")
    : isPair() ? "Press 1 or 2 for the better one, or T for a tie." : "Press their numbers from best to worst, or drag them.";
  $("hint").textContent = left ? `Which completion is ${isPair() ? "better" : "best"}? ${how}` : `Everything is ranked. Submit, or change the ${isPair() ? "choice" : "order"}.`;
}

function select(i, focus = false) {
  selected = i;
  cards.forEach(({ card }, k) => {
    card.classList.toggle("selected", k === i);
    card.tabIndex = k === i ? 0 : -1;
  });
  if (focus) {
    cards[i].card.focus({ preventScroll: true });
    cards[i].card.scrollIntoView({ block: "nearest" });
  }
}

function step(by) {
  const order = inOrder();
  const place = document.activeElement?.closest?.(".card") ? order.indexOf(selected) + by : by > 0 ? 0 : order.length - 1;
  select(order[Math.min(order.length - 1, Math.max(0, place))], true);
}

// --- texts and highlights ----------------------------------------------------------------------------------------

function showParts(target, labeled, alone, redraw) {
  const texts = [];
  for (const [label, text] of labeled) {
    if (!alone || labeled.length > 1) target.append(make("div", { class: "label" }, label));
    const block = make("div", { class: "text", dir: "auto" });
    target.append(block);
    texts.push({ block, text, open: text.length <= LONG });
    if (text.length > LONG) {
      const at = texts.length - 1;
      target.append(make("button", { type: "button", class: "more", "aria-expanded": "false", onclick: (event) => {
        texts[at].open = !texts[at].open;
        event.target.setAttribute("aria-expanded", String(texts[at].open));
        event.target.textContent = texts[at].open ? "Show less" : showAll(text);
        redraw();
      } }, showAll(text)));
    }
  }
  return texts;
}

const showAll = (text) => `Show all ${text.length.toLocaleString("en")} characters`;

function drawTexts(texts, marks = []) {
  texts.forEach(({ block, text, open }, part) => {
    const shown = open ? text : text.slice(0, LONG);
    const nodes = [];
    let at = 0;
    for (const mark of marks.filter((one) => one.part === part).sort((a, b) => a.start - b.start)) {
      const [start, end] = [Math.max(at, mark.start), Math.min(mark.end, shown.length)];
      if (end <= start) continue;
      nodes.push(shown.slice(at, start), make("mark", {}, shown.slice(start, end)));
      at = end;
    }
    nodes.push(shown.slice(at) + (open ? "" : " …"));
    block.replaceChildren(...nodes);
  });
}

const drawCompletion = (i) => {
  drawTexts(cards[i].texts, cards[i].marks);
  cards[i].clear.hidden = !cards[i].marks.length;
};

function highlight() {
  const selection = document.getSelection();
  const range = selection.rangeCount ? selection.getRangeAt(0) : null;
  const block = range && (range.startContainer.parentElement ?? range.startContainer).closest(".text");
  const i = cards.findIndex(({ texts }) => texts.some((one) => one.block === block));
  if (!range || range.collapsed || i < 0 || !block.contains(range.endContainer)) {
    return announce("First mark some text of one completion, with the mouse or by touch");
  }
  const before = document.createRange();
  before.selectNodeContents(block);
  before.setEnd(range.startContainer, range.startOffset);
  const part = cards[i].texts.findIndex((one) => one.block === block);
  const start = before.toString().length;
  const end = Math.min(start + range.toString().length, cards[i].texts[part].open ? Infinity : LONG);
  if (end <= start) return;
  const overlaps = cards[i].marks.filter((one) => one.part === part && one.start <= end && one.end >= start);
  cards[i].marks = cards[i].marks.filter((one) => !overlaps.includes(one));
  cards[i].marks.push({
    part, start: Math.min(start, ...overlaps.map((one) => one.start)), end: Math.max(end, ...overlaps.map((one) => one.end)),
  });
  selection.removeAllRanges();
  select(i);
  drawCompletion(i);
  announce(`Highlighted in completion ${i + 1}`);
}

function clearHighlights(i) {
  if (!cards[i].marks.length) return;
  cards[i].marks = [];
  drawCompletion(i);
  announce(`Highlights of completion ${i + 1} removed`);
}

// The server counts characters, JavaScript counts UTF-16 units: an emoji is one or two.
const toCharacters = (text, units) => Array.from(text.slice(0, units)).length;
const toUnits = (text, characters) => Array.from(text).slice(0, characters).join("").length;

// --- dragging ----------------------------------------------------------------------------------------------------

function startDrag(event, i) {
  if (event.button !== 0) return;
  event.preventDefault();
  const { card } = cards[i];
  const from = event.pageY;
  const gap = make("li", { class: "gap", role: "presentation" });
  let place = null;
  select(i);
  const others = inOrder().filter((other) => other !== i).map((other) => cards[other].list);
  const onMove = (moved) => {
    if (moved.pointerId !== event.pointerId) return;
    if (moved.clientY < 80) window.scrollBy(0, -16);
    else if (moved.clientY > window.innerHeight - 100) window.scrollBy(0, 16);
    card.classList.add("dragged");
    card.style.transform = `translateY(${moved.pageY - from}px)`;
    place = others.filter((item) => {
      const box = item.getBoundingClientRect();
      return moved.clientY > box.top + box.height / 2;
    }).length;
    $("cards").insertBefore(gap, others[place] ?? null);
  };
  const finish = (ended) => {
    if (ended.pointerId !== event.pointerId) return;
    for (const [name, listener] of listeners) window.removeEventListener(name, listener);
    gap.remove();
    card.classList.remove("dragged");
    card.style.transform = "";
    if (ended.type === "pointerup" && place !== null) dropAt(i, place);
  };
  const listeners = [["pointermove", onMove], ["pointerup", finish], ["pointercancel", finish]];
  for (const [name, listener] of listeners) window.addEventListener(name, listener);
}

// --- a task ------------------------------------------------------------------------------------------------------

function makeCard(labeled, i) {
  const body = make("div", { class: "body" });
  const texts = showParts(body, labeled, true, () => drawCompletion(i));
  const rank = make("button", { type: "button", class: "rank", onclick: () => rankNext(i) });
  const clear = make("button", { type: "button", onclick: () => clearHighlights(i), hidden: "" }, "Clear highlights");
  const tools = make("div", { class: "tools" }, clear);
  if (state.task.completions.length !== 2) {
    tools.append(
      make("button", { type: "button", "aria-label": `Move completion ${i + 1} up`, onclick: () => move(i, -1) }, "▲"),
      make("button", { type: "button", "aria-label": `Move completion ${i + 1} down`, onclick: () => move(i, 1) }, "▼"),
      make("button", { type: "button", class: "handle", tabindex: "-1", "aria-hidden": "true", title: "Drag", onpointerdown: (event) => startDrag(event, i) }, "⠿"),
    );
  }
  const title = make("h2", { id: `completion-${i}` }, `Completion ${i + 1}`);
  const head = make("div", { class: "head" }, rank, title, tools);
  const card = make("article", { class: "card", "aria-labelledby": `completion-${i}`, tabindex: "-1" }, head, body);
  card.addEventListener("focusin", () => select(i));
  card.addEventListener("pointerdown", () => select(i));
  return { card, rank, clear, texts, marks: [], list: make("li", {}, card) };
}

let again = 0;
async function lookAgain() {
  if (busy) return;
  try {
    const next = await ask("/api/state");
    if (!busy && !state.task && state.rater !== null) show(next);
  } catch { /* the command may have ended */ }
}

function show(next, message = "") {
  clearTimeout(again);
  state = next;
  complain("");
  const { rater, task } = state;
  $("enter").hidden = rater !== null;
  $("task").hidden = $("actions").hidden = $("done").hidden = true;
  $("who").hidden = rater === null;
  if (rater === null) return $("name").focus();
  $("who").textContent = rater;
  $("who").setAttribute("aria-label", `${rater}: change the name`);
  $("meter").max = Math.max(1, state.tasks);
  $("meter").value = state.shared ? state.settled : state.answered;
  $("count").textContent = `${$("meter").value} of ${state.tasks} answered`;
  $("actions").hidden = false;
  $("task").hidden = !task;
  $("done").hidden = Boolean(task);
  for (const button of document.querySelectorAll(".of-task")) button.hidden = !task;
  window.scrollTo(0, 0);
  if (!task) {
    cards = [];
    $("cards").replaceChildren();
    const all = $("meter").value === state.tasks;
    $("done-title").textContent = all ? "All done" : "Nothing left for you";
    $("done-text").textContent = all
      ? "Every task is answered. Thank you!"
      : "Other people are working on the remaining tasks. Thank you!";
    if (!$("done").contains(document.activeElement)) $("done-title").focus();
    again = setTimeout(lookAgain, 5000); // somebody may leave a task to others
    return announce(message);
  }
  $("title").textContent = `Task ${state.answered + 1}${state.shared ? "" : ` of ${state.tasks}`}`;
  $("prompt").replaceChildren();
  const asked = showParts($("prompt"), task.prompt, false, () => drawTexts(asked));
  drawTexts(asked);
  cards = [];
  cards = task.completions.map(makeCard);
  $("cards").replaceChildren();
  $("cards").classList.toggle("pair", isPair());
  groups = [];
  if (task.ranks) {
    const best = Math.max(...task.ranks);
    groups = Array.from({ length: best }, (_, g) => cards.map((_, i) => i).filter((i) => task.ranks[i] === g + 1));
  }
  for (const { completion, part, start, end } of task.highlights) {
    const { text } = cards[completion].texts[part];
    cards[completion].marks.push({ part, start: toUnits(text, start), end: toUnits(text, end) });
  }
  $("comment").value = task.comment;
  cards.forEach((_, i) => drawCompletion(i));
  selected = 0;
  filledIn = -1;
  draw();
  announce(message);
  $("title").focus({ preventScroll: true });
}

async function post(path, body, message) {
  if (busy) return;
  busy = true;
  try {
    show(await ask(path, body), message);
  } catch (error) {
    const lost = path === "/api/answer" ? " This answer is not stored yet: submit it again." : "";
    complain(error.message + lost);
  } finally {
    busy = false;
  }
}

function send(ranks) {
  const highlights = cards.flatMap(({ texts, marks }, completion) => marks.map(({ part, start, end }) => ({
    completion, part, start: toCharacters(texts[part].text, start), end: toCharacters(texts[part].text, end),
  })));
  const body = { task: state.task.id, ranks, comment: $("comment").value, highlights };
  return post("/api/answer", body, ranks ? "Stored" : "Skipped");
}

const actions = {
  undo: () => post("/api/undo", {}, "Your last answer is taken back"),
  skip: () => send(null),
  tie,
  highlight,
  submit: () => {
    const left = unranked().length;
    const hint = hasKeys ? " Press O to take the order shown." : "";
    if (left) return announce(`Rank every completion first: ${left} left.${hint}`);
    return send(cards.map((_, i) => groupOf(i) + 1));
  },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const target = event.target;
  if (target.matches("input, textarea")) {
    if (event.key === "Escape") $("title").focus();
    return;
  }
  const single = event.key.length === 1;
  if (busy || !state || state.rater === null || (single && !$("keys-on").checked)) return;
  const key = event.key.toLowerCase();
  const run = (action) => {
    event.preventDefault();
    action();
  };
  if (key === "u") return run(actions.undo);
  if (key === "?") return run(() => $("help").showModal());
  if (!state.task) return;
  if (/^[1-9]$/.test(key) && Number(key) <= cards.length) run(() => rankNext(Number(key) - 1));
  else if (key === "t") run(tie);
  else if (key === "s") run(actions.skip);
  else if (key === "c") run(() => $("comment").focus());
  else if (key === "h") run(highlight);
  else if (key === "x") run(() => clearHighlights(selected));
  else if (key === "o") run(() => { rankRest(); changed(); });
  else if (key === "r") run(() => { groups = []; changed(); });
  else if (key === "enter" && !target.closest("button, a")) run(actions.submit);
  else if (key === "arrowup" || key === "arrowdown") {
    const by = key === "arrowup" ? -1 : 1;
    run(() => {
      if (!event.shiftKey || isPair()) return step(by);
      move(selected, by);
      select(selected, true);
    });
  }
}

async function startRanking() {
  try {
    $("keys-on").checked = localStorage.getItem("keys") !== "off";
  } catch { /* storage is off */ }
  $("keys-on").addEventListener("change", () => {
    try { localStorage.setItem("keys", $("keys-on").checked ? "on" : "off"); } catch { /* storage is off */ }
  });
  $("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    post("/api/rater", { name: $("name").value }, "");
  });
  $("who").addEventListener("click", () => {
    $("name").value = state.rater;
    show({ rater: null });
    $("name").select();
  });
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", actions[button.dataset.do]);
  }
  // A click takes no focus: the marked text stays marked, and Enter submits instead of pressing the button again.
  for (const part of [$("task"), $("actions")]) {
    part.addEventListener("mousedown", (event) => {
      if (event.target.closest("button")) event.preventDefault();
    });
  }
  $("open-help").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", onKey);
  try {
    show(await ask("/api/state"));
  } catch (error) {
    complain(error.message);
  }
}

// --- progress ----------------------------------------------------------------------------------------------------

async function showProgress() {
  try {
    const { tasks, settled, wanted, raters, alpha, interval, compared } = await ask("/api/progress");
    $("meter").max = Math.max(1, tasks);
    $("meter").value = settled;
    const by = wanted > 1 ? ` by ${wanted} people` : "";
    $("count").textContent = `${settled} of ${tasks} tasks answered${by}`;
    const cells = (one) => [one.rater, one.ranked, one.skipped, one.undone, one.median_seconds === null ? "–" : `${one.median_seconds.toFixed(1)} s`];
    $("raters").replaceChildren(...raters.map((one) => make("tr", {}, ...cells(one).map((cell) => make("td", {}, String(cell))))));
    const range = interval ? ` [${interval.map((bound) => bound.toFixed(2)).join(", ")}]` : "";
    $("alpha").classList.toggle("big", alpha !== null);
    $("alpha").textContent = alpha === null
      ? "Not known yet: it needs tasks that two people have ranked"
      : `alpha = ${alpha.toFixed(2)}${range}, from ${compared} task${compared === 1 ? "" : "s"} that at least two people ranked`;
    complain("");
  } catch (error) {
    complain(error.message);
  }
  setTimeout(showProgress, 3000);
}

if (document.body.dataset.page === "rank") startRanking();
else showProgress();
