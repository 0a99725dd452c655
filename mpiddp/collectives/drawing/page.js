"use strict";

// ---- the model: what schedule.py, replay.py and cost.py say, as pure functions ---------------

// A schedule is {ranks, chunks, members, steps, nodes?, ends?}, a step a list of transfers
// {src, dst, lo, hi, reduce}. ends has where each column begins, once chunks are merged.

const range = (count) => Array.from({ length: count }, (_, index) => index);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const greatest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);

/** The schedule that page.py has packed: each step flat, five integers for a transfer. */
function unpack(ranks, packed) {
  const transfer = ([src, dst, lo, hi, reduce]) => ({ src, dst, lo, hi, reduce: reduce === 1 });
  const steps = packed.steps.map((flat) =>
    range(flat.length / 5).map((number) => transfer(flat.slice(5 * number, 5 * number + 5))));
  const { chunks, members = range(ranks), nodes = null } = packed;
  return { ranks, chunks, members, steps, nodes };
}

/** Pipelined: the buffer in `count` parts, each one step behind the part before it. */
function segment(schedule, count) {
  const { chunks, steps } = schedule;
  const move = (transfer, by) => ({ ...transfer, lo: transfer.lo + by, hi: transfer.hi + by });
  const together = (number) => range(count).flatMap((part) =>
    (steps[number - part] ?? []).map((transfer) => move(transfer, part * chunks)));
  const length = steps.length === 0 ? 0 : steps.length + count - 1;
  return { ...schedule, chunks: chunks * count, steps: range(length).map(together) };
}

/** Neighbouring chunks that no transfer tells apart as one column. */
function merge(schedule) {
  const cuts = new Set([0, schedule.chunks]);
  for (const { lo, hi } of schedule.steps.flat()) cuts.add(lo).add(hi);
  const ends = [...cuts].sort((one, other) => one - other);
  const column = new Map(ends.map((end, index) => [end, index]));
  const steps = schedule.steps.map((step) => step.map((transfer) =>
    ({ ...transfer, lo: column.get(transfer.lo), hi: column.get(transfer.hi) })));
  return { ...schedule, chunks: ends.length - 1, ends, steps };
}

/** How many of the equal chunks a transfer has. */
function width(schedule, { lo, hi }) {
  return schedule.ends ? schedule.ends[hi] - schedule.ends[lo] : hi - lo;
}

/**
 * The state before the first step and after each: for each rank and chunk the ranks whose
 * contributions are in it, in the order in which they were added; null for nothing.
 */
function replay(schedule) {
  const members = new Set(schedule.members);
  const states = [range(schedule.ranks).map((rank) =>
    Array(schedule.chunks).fill(members.has(rank) ? [rank] : null))];
  for (const step of schedule.steps) states.push(take(states.at(-1), step));
  return states;
}

function take(state, step) {
  const next = state.map((row) => row.slice());
  const arrivals = state.map(() => new Map());
  for (const { src, dst, lo, hi, reduce } of step) {
    for (let chunk = lo; chunk < hi; chunk++) {
      const value = state[src][chunk];
      if (!reduce) next[dst][chunk] = value;
      else if (arrivals[dst].has(chunk)) arrivals[dst].get(chunk).push([src, value]);
      else arrivals[dst].set(chunk, [[src, value]]);
    }
  }
  arrivals.forEach((chunks, rank) => chunks.forEach((operands, chunk) => {
    next[rank][chunk] = addUp(operands, rank, state[rank][chunk]);
  }));
  return next;
}

/** In the order of the sources, the rank's own value in its place. */
function addUp(operands, rank, own) {
  const all = own === null ? operands : [...operands, [rank, own]];
  return all.sort(([one], [other]) => one - other).flatMap(([, value]) => value);
}

/** Bytes of one transfer of a buffer of `size` bytes. */
function weigh(schedule, transfer, size) {
  const whole = schedule.ends ? schedule.ends.at(-1) : schedule.chunks;
  return size * width(schedule, transfer) / whole;
}

/**
 * What each step takes on a flat machine {latency, secondsPerByte, addition, size}: the slowest
 * rank's sending or receiving, whichever is longer, and then its adding.
 */
function price(schedule, machine) {
  return schedule.steps.map((step) => {
    const zeros = () => Array(schedule.ranks).fill(0);
    const [sending, receiving, adding, sent, received] = range(5).map(zeros);
    for (const transfer of step) {
      const bytes = weigh(schedule, transfer, machine.size);
      const seconds = machine.latency + bytes * machine.secondsPerByte;
      sending[transfer.src] += seconds;
      receiving[transfer.dst] += seconds;
      adding[transfer.dst] += transfer.reduce ? bytes * machine.addition : 0;
      sent[transfer.src] += bytes;
      received[transfer.dst] += bytes;
    }
    const busy = sending.map((time, rank) => Math.max(time, receiving[rank]) + adding[rank]);
    return {
      seconds: greatest(busy),
      messages: step.length,
      sent: sum(sent),
      busiest: Math.max(greatest(sent), greatest(received)),
    };
  });
}

/** Bytes and messages from each rank to each rank in the first `steps` steps. */
function countLinks(schedule, size, steps) {
  const empty = () => ({ bytes: 0, messages: 0 });
  const links = range(schedule.ranks).map(() => range(schedule.ranks).map(empty));
  for (const transfer of schedule.steps.slice(0, steps).flat()) {
    const link = links[transfer.src][transfer.dst];
    link.bytes += weigh(schedule, transfer, size);
    link.messages += 1;
  }
  return links;
}

/**
 * What no all-reduce can beat, as cost.bound has it. Dedicated servers may help: then members
 * must only send the buffer once and receive it once, which may be at the same time.
 */
function bound({ ranks, members }, machine) {
  const count = members.length;
  const volume = count === 1 ? 0 : count < ranks ? 1 : 2 * (ranks - 1) / ranks;
  const latency = Math.ceil(Math.log2(count)) * machine.latency;
  const bandwidth = volume * machine.size * machine.secondsPerByte;
  const addition = (count - 1) / ranks * machine.size * machine.addition;
  return { latency, bandwidth, addition, seconds: Math.max(latency, bandwidth, addition) };
}

/** 0 and the moment in which each step ends. */
function accumulate(prices) {
  const ends = [0];
  for (const { seconds } of prices) ends.push(ends.at(-1) + seconds);
  return ends;
}

/** How many steps are over at `time`; the fraction is that of the step under way. */
function locate(ends, time) {
  const done = ends.findLastIndex((end) => end <= time);
  if (done === ends.length - 1) return done;
  return done + (time - ends[done]) / (ends[done + 1] - ends[done]);
}

// ---- in words --------------------------------------------------------------------------------

/** a to z, then aa, ab and so on. */
function letter(rank) {
  const before = Math.floor(rank / 26);
  return (before > 0 ? letter(before - 1) : "") + String.fromCharCode(97 + rank % 26);
}

const spell = (value) => value === null ? "·" : value.map(letter).join("+");

/** Four and more neighbours as `a…d`. */
function abbreviate(value) {
  const runs = [];
  for (const rank of [...value ?? []].sort((one, other) => one - other)) {
    if (runs.at(-1)?.at(-1) === rank - 1) runs.at(-1).push(rank);
    else runs.push([rank]);
  }
  const shorten = (run) =>
    run.length < 4 ? spell(run) : `${letter(run[0])}…${letter(run.at(-1))}`;
  return runs.map(shorten).join("+") || "·";
}

/** The length of the longest abbreviation in any state. */
function findLongest(states) {
  const values = new Set(states.flat(2));
  return greatest([...values].map((value) => abbreviate(value).length));
}

const tally = (value) => value?.length > 1 ? String(value.length) : spell(value);

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function scale(value, units) {
  const [factor, unit] = units.find(([factor]) => value >= factor * 0.9995) ?? units.at(-1);
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}

const sayTime = (seconds) => seconds === 0 ? "0 µs"
  : scale(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const sayBytes = (bytes) =>
  scale(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);

/** What a step does, in one sentence without its full stop. */
function describe(schedule, step) {
  if (step.length === 0) return "nothing moves";
  const widths = new Set(step.map((transfer) => width(schedule, transfer)));
  const chunks = widths.size === 1 ? plural([...widths][0], "chunk")
    : `${Math.min(...widths)} to ${Math.max(...widths)} chunks`;
  const kinds = new Set(step.map(({ reduce }) => reduce));
  if (kinds.size === 2) return describeMixed(step, chunks);
  const verb = step[0].reduce ? "adds" : "copies";
  return describePattern(schedule.ranks, step, verb, chunks)
    ?? `${plural(step.length, "message")}${step.length > 1 ? ", each" : ""} of ${chunks}, `
    + `${step.length > 1 ? "are" : "is"} ${step[0].reduce ? "added" : "copied"}`;
}

function describeMixed(step, chunks) {
  const added = step.filter(({ reduce }) => reduce).length;
  return `${step.length} messages, each of ${chunks}: ${added} are added, `
    + `${step.length - added} copied`;
}

function describePattern(ranks, step, verb, chunks) {
  const sources = new Set(step.map(({ src }) => src));
  const targets = new Set(step.map(({ dst }) => dst));
  const other = new Map(step.map(({ src, dst }) => [src, dst]));
  const shifts = new Set(step.map(({ src, dst }) => (dst - src + ranks) % ranks));
  const distances = new Set(step.map(({ src, dst }) => Math.abs(dst - src)));
  const everybody = sources.size === ranks && targets.size === ranks;
  if (step.length === 1) {
    return `rank ${step[0].dst} ${verb} ${chunks} from rank ${step[0].src}`;
  }
  if (sources.size === step.length && step.every(({ src, dst }) => other.get(dst) === src)) {
    const how = distances.size === 1 ? ` at distance ${[...distances][0]}` : "";
    return `pairs of ranks${how} exchange ${chunks}, and each ${verb} what comes`;
  }
  if (everybody && shifts.size === 1 && step.length % ranks === 0) {
    const times = step.length / ranks > 1 ? `${step.length / ranks} times ` : "";
    return `every rank ${verb} ${times}${chunks} from ${nameNeighbour([...shifts][0], ranks)}`;
  }
  if (targets.size === 1 && sources.size === step.length) {
    return `rank ${step[0].dst} ${verb} ${chunks} from each of ${step.length} ranks`;
  }
  if (sources.size === 1 && targets.size === step.length) {
    const copying = verb === "copies" ? "copy" : "add";
    return `${step.length} ranks ${copying} ${chunks} from rank ${step[0].src}`;
  }
  const pairs = new Set(step.map(({ src, dst }) => src * ranks + dst));
  if (step.length === ranks * (ranks - 1) && pairs.size === step.length) {
    return `every rank ${verb} ${chunks} from each other rank`;
  }
  return null;
}

function nameNeighbour(shift, ranks) {
  if (shift === 1) return "its left neighbour";
  if (shift === ranks - 1) return "its right neighbour";
  return `the rank ${shift} places before it`;
}

function describeBusiest(links) {
  const all = links.flatMap((row, src) => row.map((link, dst) => ({ ...link, src, dst })));
  const used = all.filter(({ messages }) => messages > 0);
  if (used.length === 0) return "No link has been used yet.";
  const most = greatest(used.map(({ bytes }) => bytes));
  const busy = used.filter(({ bytes }) => bytes > most * (1 - 1e-9));
  const load = sayBytes(most);
  if (busy.length === used.length && used.length > 1) {
    return `All ${used.length} links in use have sent ${load} each.`;
  }
  const more = busy.length > 1 ? ` and ${busy.length - 1} more` : "";
  return `Busiest: rank ${busy[0].src} to rank ${busy[0].dst}${more}, ${load}`
    + `${more ? " each" : ""}, of ${plural(used.length, "link")} in use.`;
}

// ---- where tokens travel ---------------------------------------------------------------------

/**
 * For each transfer {lane, lanes}: transfers of the same columns that would meet on their way go
 * side by side.
 */
function assignLanes(step) {
  const order = range(step.length).sort((one, other) => step[one].lo - step[other].lo);
  const places = Array(step.length);
  let group = [], reach = 0;
  const close = () => {
    const lanes = [];
    for (const index of group) {
      const free = lanes.findIndex((lane) => !lane.some((other) => meet(step[index], step[other])));
      if (free < 0) lanes.push([index]);
      else lanes[free].push(index);
    }
    lanes.forEach((lane, number) => lane.forEach((index) => {
      places[index] = { lane: number, lanes: lanes.length };
    }));
  };
  for (const index of order) {
    if (step[index].lo >= reach) { close(); group = []; }
    group.push(index);
    reach = Math.max(reach, step[index].hi);
  }
  close();
  return places;
}

function meet(one, other) {
  const overlap = one.lo < other.hi && other.lo < one.hi;
  return overlap && (one.src - other.src) * (one.dst - other.dst) <= 0;
}

// ---- the clock -------------------------------------------------------------------------------

/**
 * When something ends, and how many units of the clock go by in a second of the reader's. Step by
 * step the unit is a step of all panels; in modelled time it is a modelled second.
 */
function makeTimeline(models, mode, pace) {
  const longest = greatest(models.map(({ prices }) => prices.length));
  if (mode === "steps") {
    const find = (model, clock) => Math.min(clock, model.prices.length);
    return { stops: range(longest + 1), rate: 1 / pace, find };
  }
  const stops = [];
  for (const end of models.flatMap(({ ends }) => ends).sort((one, other) => one - other)) {
    // Sums of the same steps may differ in the last bits, and are one stop.
    if (stops.length > 0 && end - stops.at(-1) <= 1e-9 * end) stops[stops.length - 1] = end;
    else stops.push(end);
  }
  const seconds = Math.min(60, Math.max(longest, 2) * pace);
  return { stops, rate: stops.at(-1) / seconds, find: (model, clock) => locate(model.ends, clock) };
}

function makeModel(schedule, segments, machine) {
  const merged = merge(segment(schedule, segments));
  const prices = price(merged, machine);
  return {
    schedule: merged,
    states: replay(merged),
    prices,
    ends: accumulate(prices),
    bound: bound(merged, machine),
    size: machine.size,
  };
}

window.laboratory = {
  range, unpack, segment, merge, replay, price, countLinks, bound, accumulate, locate, letter,
  abbreviate, describe, describeBusiest, assignLanes, makeTimeline, makeModel, sayTime, sayBytes,
};

// ---- the page: one panel ---------------------------------------------------------------------

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const find = (selector, root = document) => root.querySelector(selector);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

const isWhole = (value, schedule) => value !== null && value.length === schedule.members.length;

class Panel {
  constructor(host) {
    this.root = find("#panel").content.cloneNode(true).firstElementChild;
    host.append(this.root);
    for (const name of ["words", "memory", "grid", "facts", "bars", "strip", "matrix", "busiest"]) {
      this[name] = find(`.${name}`, this.root);
    }
    this.canvas = find("canvas", this.root);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.memory);
  }

  remove() {
    this.observer.disconnect();
    this.root.remove();
  }

  /** Show a model; `scales` are for all panels: seconds of a step, of all steps, bytes of a link. */
  load(model, title, summary, scales) {
    this.model = model;
    this.scales = scales;
    this.shown = null;
    setText(find("h2", this.root), title);
    setText(find(".summary", this.root), summary);
    this.root.setAttribute("aria-label", title);
    this.makeGrid();
    this.makeBars();
    this.makeMatrix();
    this.measure();
  }

  // -- what each rank holds

  makeGrid() {
    const { schedule } = this.model;
    const { ranks, chunks, nodes } = schedule;
    const firsts = new Map((nodes ?? []).map((size, node) => [sum(nodes.slice(0, node)), node]));
    this.cells = [];
    this.rows = [];
    this.headings = range(chunks).map((column) => this.makeHeading(column));
    const corner = element("span", { className: "label", role: "columnheader" });
    const head = element("div", { className: "row", role: "row" }, corner, ...this.headings);
    this.grid.replaceChildren(head);
    for (const rank of range(ranks)) {
      if (firsts.has(rank)) {
        const textContent = `node ${firsts.get(rank)}`;
        this.grid.append(element("div", { className: "node", textContent }));
      }
      this.grid.append(this.makeRow(rank));
    }
  }

  makeHeading(column) {
    const { ends } = this.model.schedule;
    const [lo, hi] = [ends[column], ends[column + 1]];
    const text = hi === lo + 1 ? `${lo}` : `${lo}–${hi - 1}`;
    const properties = { className: "heading", role: "columnheader", title: `chunk ${text}` };
    return element("span", properties, text);
  }

  makeRow(rank) {
    const { chunks, members } = this.model.schedule;
    const label = element("span", { className: "label", role: "rowheader" }, `${rank} `);
    label.append(element("b", { textContent: members.includes(rank) ? letter(rank) : "·" }));
    label.title = members.includes(rank) ? `rank ${rank} contributes ${letter(rank)}`
      : `rank ${rank} serves, and contributes nothing`;
    const cells = range(chunks).map(() => element("span", { className: "cell", role: "cell" }));
    const row = element("div", { className: "row", role: "row" }, label, ...cells);
    this.cells.push(cells);
    this.rows.push(row);
    return row;
  }

  /** Choose sizes for the room there is. */
  measure() {
    const { ranks, chunks, ends, members } = this.model.schedule;
    const style = this.grid.style;
    const height = ranks <= 4 ? 40 : ranks <= 8 ? 32 : ranks <= 16 ? 24 : ranks <= 32 ? 16 : 10;
    const gap = chunks <= 16 ? 3 : chunks <= 40 ? 2 : chunks <= 96 ? 1 : 0;
    const label = ranks <= 10 ? 38 : ranks <= 26 ? 44 : 40;
    const room = this.memory.clientWidth - 4 - label;
    const narrowest = chunks <= 64 ? 4 : 3;
    const parts = range(chunks).map((column) => ends[column + 1] - ends[column]);
    const unit = (room - gap * chunks) / ends.at(-1);
    this.widths = parts.map((part) => Math.max(narrowest, part * unit));
    this.height = height;
    Object.assign(this.canvas, { width: 0, height: 0 });
    Object.assign(this.canvas.style, { width: "0", height: "0" });
    this.places = null;
    style.setProperty("--columns", this.widths.map((width) => `${width.toFixed(2)}px`).join(" "));
    style.setProperty("--width", `${label + sum(this.widths) + gap * chunks}px`);
    style.setProperty("--label", `${label}px`);
    style.setProperty("--label-size", `${Math.min(13, height)}px`);
    style.setProperty("--height", `${height}px`);
    style.setProperty("--gap", `${height >= 16 ? 3 : 1}px`);
    style.setProperty("--column-gap", `${gap}px`);
    style.setProperty("--round", greatest(this.widths) < 12 ? "0" : "3px");
    style.setProperty("--outline", greatest(this.widths) < 8 || height < 16 ? "1px" : "2px");
    style.setProperty("--inset", gap < 3 || height < 16 ? "1px" : "0px");
    const headingsFit = Math.min(...this.widths.map((width, column) =>
      width - 7 * this.headings[column].textContent.length)) > 0;
    this.headings.forEach((heading) => { heading.style.visibility = headingsFit ? "" : "hidden"; });
    this.chooseForms(members);
  }

  /** How much of a value's text goes into a column: all, runs of letters, a number, nothing. */
  chooseForms(members) {
    if (this.height < 16) {
      this.forms = this.widths.map(() => () => "");
      return;
    }
    const longest = spell(members).length;
    const abbreviated = this.model.longestAbbreviation ??= findLongest(this.model.states);
    const fits = (width, characters) => width >= 7.3 * characters + 5;
    this.forms = this.widths.map((width) => {
      if (fits(width, longest)) return spell;
      if (fits(width, abbreviated)) return abbreviate;
      const digits = String(members.length).length;
      return fits(width, digits) ? tally : () => "";
    });
  }

  resize() {
    if (!this.model) return;
    this.measure();
    this.fill(this.filled, true);
    this.draw(this.position);
  }

  /** Write the state after `done` steps into the cells, and mark what the last of them changed. */
  fill(done, all = false) {
    const { states, schedule } = this.model;
    const [before, now] = [states[Math.max(0, done - 1)], states[done]];
    this.filled = done;
    this.marked = true;
    this.cells.forEach((row, rank) => row.forEach((cell, column) => {
      const value = now[rank][column];
      const changed = before[rank][column] !== value;
      if (all || cell.value !== value) this.write(cell, column, value, schedule);
      if (changed !== cell.hasAttribute("data-changed")) {
        cell.toggleAttribute("data-changed", changed);
      }
    }));
  }

  write(cell, column, value, schedule) {
    const whole = isWhole(value, schedule);
    const share = value === null || schedule.members.length === 1 ? 0
      : (value.length - 1) / (schedule.members.length - 1);
    cell.value = value;
    cell.textContent = this.forms[column](value);
    cell.title = value === null ? "nothing" : spell(value) + (whole ? " (the whole sum)" : "");
    cell.style.setProperty("--share", share.toFixed(3));
    cell.toggleAttribute("data-complete", whole);
    cell.toggleAttribute("data-nothing", value === null);
  }

  unmark() {
    this.marked = false;
    for (const cell of this.grid.querySelectorAll(".cell[data-changed]")) {
      cell.removeAttribute("data-changed");
    }
  }

  // -- tokens

  /** Show `position` steps; the fraction is how far the step under way has come. */
  draw(position) {
    const done = Math.floor(position);
    this.position = position;
    if (this.filled !== done || this.shown === null) this.fill(done, this.shown === null);
    // At first the marks of the step before stay, while the tokens wait where they start.
    const way = Math.max(0, Math.min(1, (position - done - 0.2) / 0.7));
    if (position - done > 0.15 && this.marked) this.unmark();
    this.tell(position === done ? done : done + 1, done);
    const still = position === done || stillness.matches;
    this.drawTokens(still ? null : done, way * way * (3 - 2 * way));
    find(".done", this.strip).style.width = `${100 * this.elapsed(position) / this.scales.total}%`;
  }

  elapsed(position) {
    const { ends } = this.model;
    const done = Math.floor(position);
    return done === ends.length - 1 ? ends[done]
      : ends[done] + (position - done) * (ends[done + 1] - ends[done]);
  }

  drawTokens(number, way) {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (number === null) return;
    this.locateCells(context, number);
    const step = this.model.schedule.steps[number];
    step.forEach((transfer, index) => this.drawToken(context, transfer, this.lanes[index], way));
  }

  /** Look up, once for a step, where cells are and what colours there are. */
  locateCells(context, number) {
    if (!this.places) {
      const origin = this.grid.getBoundingClientRect();
      const corner = (cell) => cell.getBoundingClientRect();
      const ratio = window.devicePixelRatio;
      const { width, height } = origin;
      Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
      context.scale(ratio, ratio);
      this.places = {
        tops: this.cells.map(([cell]) => corner(cell).top - origin.top),
        lefts: this.cells[0].map((cell) => corner(cell).left - origin.left),
        rights: this.cells[0].map((cell) => corner(cell).right - origin.left),
      };
      const style = getComputedStyle(this.root);
      this.colours = (name) => style.getPropertyValue(`--${name}`);
      this.laned = null;
    }
    if (this.laned !== number) {
      this.lanes = assignLanes(this.model.schedule.steps[number]);
      this.laned = number;
    }
  }

  drawToken(context, { src, dst, lo, hi, reduce }, { lane, lanes }, way) {
    const { tops, lefts, rights } = this.places;
    const height = Math.max(4, Math.min(18, this.height * 0.6));
    const span = (rights[hi - 1] - lefts[lo]) / lanes;
    const long = Math.max(2, Math.min(span - 2, Math.max(26, (rights[hi - 1] - lefts[lo]) * 0.72)));
    const x = lefts[lo] + span * (lane + 0.5) - long / 2;
    const y = tops[src] + (tops[dst] - tops[src]) * way + (this.height - height) / 2;
    const colours = this.colours;
    context.beginPath();
    context.fillStyle = colours(reduce ? "add" : "surface");
    if (reduce) context.roundRect(x, y, long, height, Math.min(long, height) / 2);
    else context.rect(x + 1, y + 1, Math.max(1, long - 2), height - 2);
    context.fill();
    context.lineWidth = reduce ? 1 : Math.min(2, height / 4);
    context.strokeStyle = colours(reduce ? "surface" : "copy");
    context.stroke();
    if (height < 10 || long < 12) return;
    context.fillStyle = colours(reduce ? "on-add" : "copy");
    context.font = "700 13px ui-monospace, monospace";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(reduce ? "+" : "=", x + long / 2, y + height / 2 + 1);
  }

  // -- the rest

  /** What step `number` does, when `done` steps are over. */
  tell(number, done) {
    const key = `${number} ${done}`;
    if (this.shown === key) return;
    this.shown = key;
    setText(this.words, this.say(number, done));
    [...this.bars.children].forEach((bar, index) => {
      bar.toggleAttribute("data-past", index < done);
      if (index === number - 1) bar.setAttribute("aria-current", "step");
      else bar.removeAttribute("aria-current");
    });
    this.showBar(number - 1);
    this.count(done);
    this.heat(done);
  }

  say(number, done) {
    const { schedule } = this.model;
    const { ranks, members, steps } = schedule;
    const holders = members.length < ranks ? "every rank that contributes" : "every rank";
    if (steps.length === 0) {
      return "No step is needed: one rank alone has the whole sum from the beginning.";
    }
    if (number === 0) {
      return `Before the first of ${plural(steps.length, "step")}, ${holders} has its own buffer.`;
    }
    const what = `Step ${number} of ${steps.length}: ${describe(schedule, steps[number - 1])}.`;
    return done < steps.length ? what : `${what} Now ${holders} has the whole sum.`;
  }

  count(done) {
    const { schedule, prices, ends, bound, size } = this.model;
    const sent = (steps) => {
      const links = countLinks(schedule, size, steps);
      return greatest(links.map((row) => sum(row.map(({ bytes }) => bytes))));
    };
    const messages = (steps) => sum(prices.slice(0, steps).map((step) => step.messages));
    const facts = [
      ["Steps", `${done} of ${prices.length}`],
      ["Time", `${sayTime(ends[done])} of ${sayTime(ends.at(-1))}`],
      ["Messages", `${messages(done)} of ${messages()}`],
      ["Bytes", `${sayBytes(sent(done))} of ${sayBytes(sent())}`, "sent by the busiest rank"],
      ["Lower bound", sayTime(bound.seconds), this.explainBound()],
    ];
    this.facts.replaceChildren(...facts.flatMap(([name, value, note]) => [
      element("dt", { textContent: name }),
      element("dd", {}, value, ...note ? [element("small", { textContent: note })] : []),
    ]));
  }

  explainBound() {
    const { bound, ends } = this.model;
    const parts = `the greatest of latency ${sayTime(bound.latency)}, bandwidth `
      + `${sayTime(bound.bandwidth)}, additions ${sayTime(bound.addition)}`;
    if (bound.seconds === 0) return parts;
    return `${parts}; the total is ${(ends.at(-1) / bound.seconds).toFixed(2)} times as long`;
  }

  makeBars() {
    const { prices } = this.model;
    const bars = prices.map(({ seconds, messages, busiest }, index) => {
      const bar = element("button", { type: "button", tabIndex: -1 });
      bar.title = `Step ${index + 1}: ${sayTime(seconds)}, ${plural(messages, "message")}, `
        + `up to ${sayBytes(busiest)} through a rank`;
      bar.setAttribute("aria-label", bar.title);
      bar.style.setProperty("--part", seconds / this.scales.step || 0);
      bar.addEventListener("click", () => this.onStep(index + 1));
      return bar;
    });
    const none = element("p", { textContent: "There are no steps." });
    this.bars.replaceChildren(...bars.length > 0 ? bars : [none]);
    const most = greatest(prices.map(({ seconds }) => seconds));
    setText(find(".costs .most", this.root), most ? `up to ${sayTime(most)}` : "");
    this.makeStrip();
  }

  makeStrip() {
    const { ends, bound } = this.model;
    const place = (seconds) => `${100 * seconds / this.scales.total}%`;
    find(".total", this.strip).style.width = place(ends.at(-1));
    find(".least", this.strip).style.left = `min(${place(bound.seconds)}, 100% - 3px)`;
    find(".least", this.strip).hidden = bound.seconds === 0;
    const text = `${sayTime(ends.at(-1))}; dashed: lower bound`;
    setText(find(".race .most", this.root), bound.seconds > 0 ? text : sayTime(ends.at(-1)));
    this.strip.setAttribute("aria-label", `Modelled time: ${text} ${sayTime(bound.seconds)}`);
  }

  showBar(index) {
    const bar = this.bars.children[index];
    if (!bar || this.bars.scrollWidth <= this.bars.clientWidth) return;
    this.bars.scrollLeft = bar.offsetLeft - this.bars.offsetLeft - this.bars.clientWidth / 2;
  }

  makeMatrix() {
    const { ranks } = this.model.schedule;
    const named = ranks <= 16;
    const size = Math.max(4, Math.min(26, Math.floor(290 / (ranks + named))));
    this.matrix.classList.toggle("fine", size < 8);
    this.matrix.style.gridTemplateColumns = `repeat(${ranks + named}, max-content)`;
    this.matrix.style.setProperty("--size", `${size}px`);
    this.matrix.style.setProperty("--gap", size < 8 ? "0px" : "1px");
    const name = (rank) => element("span", { className: "name", textContent: rank });
    this.pairs = range(ranks).map((src) => range(ranks).map((dst) =>
      element("span", { className: src === dst ? "self" : "pair" })));
    const head = named ? [element("span"), ...range(ranks).map(name)] : [];
    const rows = this.pairs.flatMap((row, src) => [...named ? [name(src)] : [], ...row]);
    this.matrix.replaceChildren(...head, ...rows);
  }

  heat(done) {
    const links = countLinks(this.model.schedule, this.model.size, done);
    links.forEach((row, src) => row.forEach(({ bytes, messages }, dst) => {
      const pair = this.pairs[src][dst];
      if (src === dst || pair.bytes === bytes) return;
      pair.bytes = bytes;
      pair.style.setProperty("--heat", (bytes / this.scales.link || 0).toFixed(3));
      const load = `${sayBytes(bytes)} in ${plural(messages, "message")}`;
      pair.title = `rank ${src} to rank ${dst}: ${load}`;
    }));
    const words = describeBusiest(links);
    setText(this.busiest, words);
    this.matrix.setAttribute("aria-label", words);
  }
}

// ---- the page: what is chosen, and the clock -------------------------------------------------

const SEGMENTS = [1, 2, 3, 4, 6, 8, 12, 16, 32];
const data = JSON.parse(find("#data").textContent);
const form = find("#settings");
const slider = find("#slider");
const controls = form.elements;

let panels = [];
let timeline = { stops: [0], rate: 1, find: () => 0 };
let clock = 0;
let target = null;
let lastFrame = null;

const offered = (ranks, name) => data.schedules[ranks]?.[name];
const isPlaying = () => target !== null;
const choices = () => [
  [controls.first, controls.firstSegments],
  [controls.second, controls.secondSegments],
];

function fillChoices() {
  const names = Object.keys(data.algorithms);
  const option = (value, text = value) => element("option", { value, textContent: text });
  controls.first.append(...names.map((name) => option(name)));
  controls.second.append(option("", "none"), ...names.map((name) => option(name)));
  controls.ranks.append(...Object.keys(data.schedules).map((ranks) => option(ranks)));
  const wanted = data.start.panels.map(({ segments }) => segments);
  const counts = [...new Set([...SEGMENTS, ...wanted])].sort((one, other) => one - other);
  for (const list of [controls.firstSegments, controls.secondSegments]) {
    list.append(...counts.map((count) => option(count)));
  }
  const [first, second] = data.start.panels;
  controls.ranks.value = data.start.ranks;
  Object.assign(controls.first, { value: first.name });
  Object.assign(controls.firstSegments, { value: first.segments });
  Object.assign(controls.second, { value: second?.name ?? "" });
  Object.assign(controls.secondSegments, { value: second?.segments ?? 1 });
}

/** Switch off what cannot be on so many ranks, and leave it for what comes nearest. */
function limitChoices() {
  const ranks = controls.ranks.value;
  for (const [list, counts] of choices()) {
    for (const option of list.options) {
      option.disabled = option.value !== "" && !offered(ranks, option.value);
    }
    if (list.selectedOptions[0].disabled) list.value = list.value.split(":")[0];
    counts.disabled = list.value === "";
    if (counts.disabled) continue;
    limitSegments(counts, merge(unpack(Number(ranks), offered(ranks, list.value))));
  }
}

function limitSegments(counts, schedule) {
  const cells = schedule.ranks * schedule.chunks;
  for (const option of counts.options) {
    option.disabled = Number(option.value) * cells > data.largestGrid;
  }
  if (!counts.selectedOptions[0].disabled) return;
  counts.value = [...counts.options].findLast((option) => !option.disabled).value;
}

/** The machine that the fields describe; null, and a word about it, where one cannot be read. */
function readMachine() {
  const fields = ["latency", "bandwidth", "size", "additions"].map((name) => controls[name]);
  const wrong = fields.filter((field) => !field.checkValidity());
  fields.forEach((field) => field.setAttribute("aria-invalid", wrong.includes(field)));
  const name = (field) => field.labels[0].firstChild.textContent.trim();
  setText(find("#problem"), wrong.map((field) =>
    `${name(field)} must be a number from ${field.min} to ${field.max}.`).join(" "));
  if (wrong.length > 0) return null;
  return {
    latency: Number(controls.latency.value) * 1e-6,
    secondsPerByte: 8e-9 / Number(controls.bandwidth.value),
    size: Number(controls.size.value) * 1e6,
    addition: 1e-9 / Number(controls.additions.value),
  };
}

function readPanels() {
  return choices().filter(([list]) => list.value !== "").map(([list, counts]) =>
    ({ name: list.value, segments: Number(counts.value) }));
}

/** Make everything anew from what is chosen; the clock stays at its stop if `stay`. */
function rebuild(stay = true) {
  const machine = readMachine();
  if (machine === null) return;
  const stop = stay ? countStops() : 0;
  halt();
  limitChoices();
  const ranks = Number(controls.ranks.value);
  const chosen = readPanels();
  const models = chosen.map(({ name, segments }) =>
    makeModel(unpack(ranks, offered(ranks, name)), segments, machine));
  fitPanels(models.length);
  const scales = {
    step: greatest(models.flatMap(({ prices }) => prices.map(({ seconds }) => seconds))),
    total: greatest(models.flatMap(({ ends, bound }) => [ends.at(-1), bound.seconds])) || 1,
    link: greatest(models.flatMap(({ schedule, size }) =>
      countLinks(schedule, size).flat().map(({ bytes }) => bytes))),
  };
  chosen.forEach(({ name, segments }, index) => {
    const cut = segments > 1 ? `, ${segments} segments` : "";
    const title = `${name} on ${plural(ranks, "rank")}${cut}`;
    panels[index].load(models[index], title, data.algorithms[name], scales);
  });
  describeModel(models);
  wind(stop);
}

function fitPanels(count) {
  const host = find("#panels");
  while (panels.length > count) panels.pop().remove();
  while (panels.length < count) {
    const panel = new Panel(host);
    panel.onStep = (number) =>
      goTo(controls.mode.value === "steps" ? number : panel.model.ends[number]);
    panels.push(panel);
  }
  host.classList.toggle("both", count > 1);
}

function nameSizes(nodes) {
  if (new Set(nodes).size === 1) return plural(nodes[0], "rank");
  return `${nodes.slice(0, -1).join(", ")} and ${nodes.at(-1)} ranks`;
}

function describeModel(models) {
  const nodes = models.find(({ schedule }) => schedule.nodes)?.schedule.nodes;
  const where = nodes ? `Nodes of ${nameSizes(nodes)} are marked, but every pair of ranks has `
    + "the same link here, as if there were one rank on each node. " : "";
  setText(find("#model"), `${where}A step takes as long as its slowest rank: the greater of its `
    + "sending and its receiving, one message after the other (latency + bytes / bandwidth), and "
    + "then its adding. Steps do not overlap, and chunks are of equal size.");
}

/** Take the timeline of what is loaded, at its stop number `stop`. */
function wind(stop) {
  const models = panels.map(({ model }) => model);
  timeline = makeTimeline(models, controls.mode.value, Number(controls.speed.value));
  slider.max = timeline.stops.length - 1;
  slider.disabled = timeline.stops.length === 1;
  goTo(timeline.stops[Math.max(0, Math.min(stop, timeline.stops.length - 1))]);
}

const countStops = () => timeline.stops.findLastIndex((stop) => stop <= clock);

function show() {
  for (const panel of panels) panel.draw(timeline.find(panel.model, clock));
  const stop = countStops();
  const last = timeline.stops.length - 1;
  slider.value = stop;
  const where = controls.mode.value === "steps" ? `step ${stop} of ${last}`
    : `${sayTime(clock)} of ${sayTime(timeline.stops[last])}`;
  setText(find("#where"), where);
  slider.setAttribute("aria-valuetext", where);
  // Not `disabled`, which would take the focus from who has just pressed it.
  const switchOff = (id, off) => find(`#${id}`).setAttribute("aria-disabled", off);
  switchOff("play", last === 0);
  for (const id of ["begin", "previous"]) switchOff(id, clock === 0);
  for (const id of ["next", "end"]) switchOff(id, stop === last);
}

function frame(now) {
  if (!isPlaying()) return;
  const passed = lastFrame === null ? 0 : Math.min(0.25, (now - lastFrame) / 1000);
  lastFrame = now;
  clock = Math.min(target, clock + passed * timeline.rate);
  if (clock === target) return goTo(target);
  show();
  requestAnimationFrame(frame);
}

function advanceTo(stop) {
  const idle = !isPlaying();
  target = stop;
  showPlaying();
  if (idle) {
    lastFrame = null;
    requestAnimationFrame(frame);
  }
}

function halt() {
  target = null;
  showPlaying();
}

/** Go there at once, and stay. */
function goTo(stop) {
  halt();
  clock = stop;
  show();
  keep();
}

function showPlaying() {
  const running = target === timeline.stops.at(-1);
  find("#play").setAttribute("aria-pressed", running);
  setText(find("#play span"), running ? "Pause" : "Play");
}

const actions = {
  play() {
    if (isPlaying()) {
      halt();
      keep();
    } else if (timeline.stops.length > 1) {
      if (clock === timeline.stops.at(-1)) goTo(0);
      advanceTo(timeline.stops.at(-1));
    }
  },
  begin: () => goTo(0),
  end: () => goTo(timeline.stops.at(-1)),
  previous: () => goTo(timeline.stops.findLast((stop) => stop < clock) ?? 0),
  next() {
    if (isPlaying() && target !== timeline.stops.at(-1)) goTo(target);
    else halt();
    const stop = timeline.stops.find((one) => one > clock);
    if (stop === undefined) return;
    if (stillness.matches) goTo(stop);
    else advanceTo(stop);
  },
};

const KEYS = { " ": "play", ArrowLeft: "previous", ArrowRight: "next", Home: "begin", End: "end" };

function onKey(event) {
  const action = KEYS[event.key];
  const busy = event.target.closest("select, input") !== null
    || (event.key === " " && event.target.closest("button") !== null);
  if (!action || busy || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  actions[action]();
}

// ---- the address -----------------------------------------------------------------------------

let kept = "";

/** Write what is chosen into the address. */
function keep() {
  const chosen = [...controls].filter(({ name, disabled }) => name && !disabled);
  const pairs = chosen.map(({ name, value }) => [name, value]);
  kept = `#${new URLSearchParams([...pairs, ["at", countStops()]])}`;
  history.replaceState(null, "", kept);
}

/** Read it back; what it does not say, or what cannot be, stays as it is. */
function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of wanted) {
    const control = controls.namedItem(name);
    if (control === null) continue;
    const before = control.value;
    control.value = value;
    const isList = control.tagName === "SELECT";
    const possible = isList ? control.selectedIndex >= 0 : control.checkValidity();
    if (!possible) control.value = before;
  }
  const stop = Number(wanted.get("at"));
  rebuild(false);
  wind(Number.isInteger(stop) ? stop : 0);
}

// ---- what the reader does --------------------------------------------------------------------

fillChoices();
for (const name of Object.keys(actions)) find(`#${name}`).addEventListener("click", actions[name]);
slider.addEventListener("input", () => goTo(timeline.stops[slider.valueAsNumber]));
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", onKey);
document.addEventListener("input", ({ target: control }) => {
  if (control.name === "mode" || control.name === "speed") wind(sameStop());
  else if (control.form === form) rebuild();
});
window.addEventListener("hashchange", () => { if (location.hash !== kept) recall(); });
// Colours are looked up with the places.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const panel of panels) panel.resize();
});
recall();

/** The stop of the timeline to come at which the first panel has done as many steps as now. */
function sameStop() {
  const { model, position } = panels[0];
  const done = Math.floor(position);
  if (controls.mode.value === "steps") return done;
  const { stops } = makeTimeline(panels.map((panel) => panel.model), "time", 1);
  return stops.findLastIndex((stop) => stop <= model.ends[done]);
}
