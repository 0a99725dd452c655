// ---- one panel: what each rank holds, what travels, what it costs -----------------------------

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const find = (selector, root = document) => root.querySelector(selector);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

const isWhole = (value, schedule) => value?.length === contributors(schedule, 0).length;

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
    const { schedule: { ranks }, nodes } = this.model;
    const marked = nodes?.length > 1 ? nodes : [];
    const firsts = new Map(marked.map((_, node) => [sum(marked.slice(0, node)), node]));
    this.cells = [];
    this.rows = [];
    this.headings = range(this.model.schedule.ends.length - 1)
      .map((column) => this.makeHeading(column));
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
    const { members, owners } = this.model.schedule;
    const label = element("span", { className: "label", role: "rowheader" }, `${rank} `);
    const contributes = (owners ?? members).includes(rank);
    label.append(element("b", { textContent: contributes ? letter(rank) : "·" }));
    label.title = contributes ? `rank ${rank} contributes ${letter(rank)}`
      : `rank ${rank}${members.includes(rank) ? "" : " serves, and"} contributes nothing`;
    const cells = this.headings.map(() => element("span", { className: "cell", role: "cell" }));
    const row = element("div", { className: "row", role: "row" }, label, ...cells);
    this.cells.push(cells);
    this.rows.push(row);
    return row;
  }

  /** Choose sizes for the room there is. */
  measure() {
    const { ranks, ends, members } = this.model.schedule;
    const chunks = ends.length - 1;
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
    cell.title = value === null ? "nothing" : spell(value) + (whole && !schedule.owners ? " (the whole sum)" : "");
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
      return "No step is needed: one rank alone has all of it from the beginning.";
    }
    if (number === 0) {
      const before = data.before.replace("@", holders);
      return `Before the first of ${plural(steps.length, "step")}, ${before}.`;
    }
    const what = `Step ${number} of ${steps.length}: ${describe(schedule, steps[number - 1])}.`;
    return done < steps.length ? what : `${what} Now ${data.after.replace("@", holders)}.`;
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
