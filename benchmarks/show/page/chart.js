const SVG = "http://www.w3.org/2000/svg";
const TOP = 12, BOTTOM = 26, GAP = 10, ROW = 14, FONT = 12;
const pen = document.createElement("canvas").getContext("2d");

/** An element of SVG, or of HTML if the parent is, with attributes; added to its parent. */
function add(parent, name, attributes = {}, text = "") {
  const isDrawn = parent.namespaceURI === SVG || name === "svg";
  const made = isDrawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  parent.append(made);
  return made;
}

function measure(text) {
  pen.font = `600 ${FONT}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

/** Three figures, and no more zeros than they need. */
function figures(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function describeValue(value, unit) {
  if (unit === "s") {
    const size = Math.abs(Number(value.toPrecision(3)));
    const [scale, name] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"]
      : [1e-6, "µs"];
    return `${figures(value / scale)} ${name}`;
  }
  if (unit === "%") return `${figures(value * 100)} %`;
  return `${figures(value)} ${unit}`;
}

/** ``1.2–1.4 ms``: the unit once if it is the same. */
function describeRange(low, high, unit) {
  const [first, last] = [low, high].map((value) => describeValue(value, unit));
  const [number, name] = first.split(" ");
  return last.endsWith(` ${name}`) ? `${number}–${last}` : `${first} – ${last}`;
}

function describePlace(value, along) {
  if (along !== "bytes") return `${figures(value)} ${along}`;
  const power = Math.min(3, Math.floor(Math.log2(value) / 10));
  return `${figures(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

/** Round values in a range: of a logarithmic axis as many as it needs, of a linear one about 5. */
function chooseTicks(low, high, isLog) {
  if (isLog && high / low > 3) {
    for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        ticks.push(...digits.map((digit) => digit * 10 ** power));
      }
      const inside = ticks.filter((tick) => tick >= low && tick <= high);
      const each = Math.ceil(inside.length / 9);
      if (inside.length >= 4) return inside.filter((_, at) => at % each === 0);
    }
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, at) => (Math.ceil(low / step - 1e-9) + at) * step);
}

/** A function from values to pixels. */
function makeScale(low, high, start, end, isLog) {
  const bend = isLog ? Math.log : (value) => value;
  const span = bend(high) - bend(low) || 1;
  return (value) => start + (bend(value) - bend(low)) / span * (end - start);
}

/** The least and greatest value of the shown lines, with some room. */
function findRange(chart, shown) {
  const values = shown.flatMap(({ line }) => chart.values[line]).filter((value) => value !== null);
  if (chart.mark) values.push(chart.mark[0]);
  const low = Math.min(...values), high = Math.max(...values);
  // Over time, values begin where they begin.
  const margin = 0.08 * (high - low || 1);
  if (chart.along !== "bytes") return [low - margin, high + margin];
  if (!chart.isLog) return [Math.min(0, low), high * 1.06 || 1];
  const room = Math.max((high / low) ** 0.06, 1.03);
  return [low / room, high * room];
}

/** The rows of a name: one where it fits, if need be without the maker, which the button above also
 * names; else two, cut where they must be. */
function breakName(whole, width) {
  if (measure(whole) <= width) return [whole];
  const name = whole.replace(/^mpiddp /, "");
  if (measure(name) <= width) return [name];
  const at = [", ", " ", "-"].map((mark) => name.indexOf(mark)).find((place) => place > 0) + 1;
  const rows = at ? [name.slice(0, at).trim(), name.slice(at).trim()] : [name];
  return rows.map((row) => {
    let text = row;
    while (text.length > 3 && measure(text) > width) text = `${text.slice(0, -2)}…`;
    return text;
  });
}

/** Give each label a height of its own, as near to its line's end as the others let it. */
function spreadLabels(labels, top, bottom) {
  labels.sort((one, other) => one.wanted - other.wanted);
  let edge = top;
  for (const label of labels) {
    label.y = Math.max(label.wanted - label.height / 2, edge);
    edge = label.y + label.height;
  }
  edge = bottom;
  for (const label of labels.toReversed()) {
    label.y = Math.min(label.y, edge - label.height);
    edge = label.y;
  }
}

/** Where everything is: scales, places in pixels, and labels beside the lines' ends. */
function arrange(chart, shown, width, height) {
  const [low, high] = findRange(chart, shown);
  const ticks = chooseTicks(low, high, chart.isLog);
  const left = Math.max(...ticks.map((tick) => measure(describeValue(tick, chart.unit)))) + 8;
  const room = Math.min(width * 0.34, 190);
  const labels = shown.map((each) => ({ ...each, rows: breakName(each.name, room) }));
  const right = width - Math.max(...labels.flatMap(({ rows }) => rows).map(measure)) - 2 * GAP;
  const bottom = height - BOTTOM, [first, last] = [chart.places[0], chart.places.at(-1)];
  const isLog = chart.along === "bytes";
  // A single place stands beside its labels: a long way to them would look like a curve.
  const start = first === last ? right : left + GAP;
  const x = makeScale(isLog ? first : 0, last, start, right, isLog);
  const y = makeScale(low, high, bottom, TOP, chart.isLog);
  for (const label of labels) {
    const values = chart.values[label.line];
    label.end = chart.places.findLastIndex((_, at) => values[3 * at] !== null);
    label.wanted = y(values[3 * label.end]);
    label.height = label.rows.length * ROW + 1;
  }
  spreadLabels(labels, TOP - 6, bottom + 6);
  return { x, y, left, right, bottom, ticks, labels, width, height };
}

/** Every place's text, every second one's, …: as many as have room beside each other. */
function choosePlaces(chart, scale) {
  const places = chart.along === "bytes" ? chart.places
    : chooseTicks(0, chart.places.at(-1), false);
  const texts = places.map((place) => describePlace(place, chart.along));
  const all = texts.map((text, at) => ({ text, x: scale(places[at]), width: measure(text) }));
  for (let step = 1; ; step += 1) {
    const some = all.filter((_, at) => at % step === 0);
    const fits = some.slice(1).every(({ x, width }, at) =>
      x - some[at].x > (width + some[at].width) / 2 + 8);
    if (fits) return some;
  }
}

function drawAxes(svg, chart, at) {
  for (const tick of at.ticks) {
    const y = at.y(tick);
    add(svg, "line", { class: "rule", x1: at.left + 2, x2: at.right, y1: y, y2: y });
    add(svg, "text", { x: at.left - 4, y: y + 4, "text-anchor": "end" },
      describeValue(tick, chart.unit));
  }
  for (const { text, x } of choosePlaces(chart, at.x)) {
    add(svg, "line", { class: "tick", x1: x, x2: x, y1: at.bottom, y2: at.bottom + 4 });
    add(svg, "text", { x, y: at.height - 6, "text-anchor": "middle" }, text);
  }
  add(svg, "line", { class: "axis", x1: at.left + 2, x2: at.right, y1: at.bottom, y2: at.bottom });
  if (chart.mark) {
    const y = at.y(chart.mark[0]);
    add(svg, "line", { class: "mark", x1: at.left + 2, x2: at.right, y1: y, y2: y });
  }
}

function drawLine(svg, chart, at, { line, slot, end, rows, y, height }) {
  const values = chart.values[line];
  const known = chart.places.map((place, number) => [at.x(place), 3 * number])
    .filter(([, number]) => values[number] !== null);
  const join = (points) => points.map(([x, value]) =>
    `${x.toFixed(1)},${at.y(value).toFixed(1)}`).join("L");
  const middle = known.map(([x, number]) => [x, values[number]]);
  const upper = known.map(([x, number]) => [x, values[number + 2]]);
  const lower = known.map(([x, number]) => [x, values[number + 1]]);
  const group = add(svg, "g", { class: `line slot-${slot}` });
  add(group, "path", { class: "band", d: `M${join([...upper, ...lower.toReversed()])}Z` });
  add(group, "path", { class: "median", d: `M${join(middle)}` });
  for (const [x, value] of middle) add(group, "circle", { cx: x, cy: at.y(value), r: 2.2 });
  for (const place of chart.wrong[line] ?? []) {
    const [cx, cy] = [at.x(chart.places[place]), at.y(values[3 * place])];
    add(group, "circle", { class: "wrong", cx, cy, r: 6 });
  }
  const from = [at.x(chart.places[end]), at.y(values[3 * end])];
  const to = [at.right + GAP - 2, y + height / 2];
  add(group, "path", { class: "leader", d: `M${from}L${to}` });
  rows.forEach((row, number) => add(group, "text",
    { x: at.right + GAP + 1, y: y + ROW * number + FONT - 1 }, row));
}

/** Draw a chart into its host, as wide as that is; returns where everything is. */
function drawChart(host, chart, shown) {
  const width = Math.max(280, host.clientWidth);
  const height = Math.round(Math.min(330, 80 + width * 0.55));
  host.querySelector("svg")?.remove();
  const svg = add(host, "svg", {
    viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "xMinYMid", "aria-hidden": "true",
  });
  const at = arrange(chart, shown, width, height);
  drawAxes(svg, chart, at);
  // The first line, which others are compared with, is drawn last.
  for (const label of at.labels.toSorted((one, other) => other.slot - one.slot)) {
    drawLine(svg, chart, at, label);
  }
  if (chart.mark) {
    const place = { x: at.left + 6, y: at.y(chart.mark[0]) - 5 };
    add(svg, "text", { class: "mark-text", ...place }, chart.mark[1]);
  }
  at.cursor = add(svg, "line", { class: "cursor", y1: TOP, y2: at.bottom, visibility: "hidden" });
  return at;
}
