const { sections } = JSON.parse(document.querySelector("#data").textContent);
const MOST = 6, COLOURS = 10;

/** What a panel's readers have chosen, and what shows it. */
function openPanel(root) {
  const { panels, colours } = sections[root.dataset.section];
  const choice = root.querySelector("select"), chips = root.querySelector(".chips");
  const charts = root.querySelector(".charts");
  let chosen = [], plots = [];

  /** The lines that are chosen, each with a colour that no other one has. */
  function assign(names) {
    const taken = new Set();
    return chosen.map((name) => {
      const free = [...Array(COLOURS).keys()].filter((slot) => !taken.has(slot));
      const slot = free.includes(colours[name]) ? colours[name] : free.at(-1);
      taken.add(slot);
      return { name, slot, line: names.indexOf(name) };
    });
  }

  function draw() {
    const panel = panels[choice?.selectedIndex ?? 0], shown = assign(panel.lines);
    for (const chip of chips.children) {
      const found = shown.find(({ name }) => name === chip.textContent);
      chip.ariaPressed = String(Boolean(found));
      chip.className = found ? `slot-${found.slot}` : "";
    }
    plots.forEach((plot) => plot.draw(shown));
  }

  function toggle(name) {
    const others = chosen.filter((each) => each !== name);
    if (others.length === chosen.length) chosen = [...chosen.slice(-MOST + 1), name];
    else if (others.length > 0) chosen = others;
    draw();
  }

  function build() {
    const panel = panels[choice?.selectedIndex ?? 0];
    const kept = chosen.filter((name) => panel.lines.includes(name));
    chosen = kept.length > 0 ? kept : [...panel.shown];
    chips.replaceChildren();
    for (const name of panel.lines) {
      add(chips, "button", { type: "button" }, name).addEventListener("click", () => toggle(name));
    }
    chips.hidden = panel.lines.length < 2;
    charts.replaceChildren();
    plots = panel.charts.map((chart) => makePlot(charts, chart, panel.lines));
    draw();
  }

  choice?.addEventListener("input", build);
  build();
  let width = charts.clientWidth;
  new ResizeObserver(() => {
    if (charts.clientWidth !== width) draw();
    width = charts.clientWidth;
  }).observe(charts);
  return { pick(number) { choice.selectedIndex = number; build(); root.scrollIntoView(); } };
}

/** A figure: caption, picture, what is said of the place that is pointed at, and a table. */
function makePlot(parent, chart, names) {
  const figure = add(parent, "figure", { class: "chart" });
  const caption = add(figure, "figcaption");
  add(caption, "h4", {}, chart.title);
  add(caption, "p", {}, chart.text);
  const host = add(figure, "div", {
    class: "plot", tabindex: 0, role: "group",
    "aria-label": `${chart.title}. ${chart.text} Arrow keys move along the axis; all figures are `
      + "in the table behind it.",
  });
  const tip = add(host, "div", { class: "tip", role: "status", hidden: "" });
  const details = add(figure, "details");
  add(details, "summary", {}, "Table");
  details.addEventListener("toggle", () => fillTable(details, chart, names), { once: true });
  let shown = [], at = null, place = -1;

  function point(number) {
    place = Math.max(0, Math.min(chart.places.length - 1, number));
    const x = at.x(chart.places[place]);
    at.cursor.setAttribute("x1", x);
    at.cursor.setAttribute("x2", x);
    at.cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    fillTip(tip, chart, shown, place);
  }

  function leave() {
    place = -1;
    tip.hidden = true;
    at.cursor.setAttribute("visibility", "hidden");
  }

  function seek(event) {
    const box = host.getBoundingClientRect();
    const x = (event.clientX - box.left) * at.width / box.width;
    const gaps = chart.places.map((each) => Math.abs(at.x(each) - x));
    point(gaps.indexOf(Math.min(...gaps)));
  }

  const MOVES = {
    ArrowLeft: () => place < 0 ? chart.places.length - 1 : place - 1, ArrowRight: () => place + 1,
    Home: () => 0, End: () => chart.places.length - 1,
  };
  host.addEventListener("pointermove", seek);
  host.addEventListener("pointerdown", seek);
  host.addEventListener("pointerleave", leave);
  host.addEventListener("blur", leave);
  host.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    point(MOVES[event.key]());
  });
  return {
    draw(lines) {
      // A contender may be missing in a chart, as the framework is where it is the measure.
      shown = lines.filter(({ line }) => chart.values[line].some((value) => value !== null));
      figure.hidden = shown.length === 0;
      if (shown.length === 0) return;
      at = drawChart(host, chart, shown);
      host.append(tip);
      if (place < 0) leave(); else point(place);
    },
  };
}

function describePoint(chart, line, place) {
  const [median, low, high] = chart.values[line].slice(3 * place, 3 * place + 3);
  if (median === null) return ["–", ""];
  const range = describeRange(low, high, chart.unit);
  const more = [low === high ? "" : range, chart.notes[line]?.[place] ?? ""];
  return [describeValue(median, chart.unit), more.filter((text) => text !== "").join(", ")];
}

function fillTip(tip, chart, shown, place) {
  tip.replaceChildren();
  add(tip, "strong", {}, describePlace(chart.places[place], chart.along));
  const table = add(tip, "table");
  const height = ({ line }) => chart.values[line][3 * place] ?? -Infinity;
  for (const each of shown.toSorted((one, other) => height(other) - height(one))) {
    const row = add(table, "tr", { class: `slot-${each.slot}` });
    const [value, more] = describePoint(chart, each.line, place);
    add(row, "th", { scope: "row" }, each.name);
    add(row, "td", {}, value);
    add(row, "td", { class: "more" }, more);
  }
}

function fillTable(details, chart, names) {
  const known = names.map((name, line) => ({ name, line }))
    .filter(({ line }) => chart.values[line].some((value) => value !== null));
  const table = add(add(details, "div", { class: "scroll", tabindex: 0 }), "table");
  add(table, "caption", { class: "hidden" }, `${chart.title}. ${chart.text}`);
  const head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  add(head, "th", { scope: "col" }, chart.along === "bytes" ? "Size" : chart.along);
  for (const { name } of known) add(head, "th", { scope: "col" }, name);
  chart.places.forEach((place, number) => {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, describePlace(place, chart.along));
    for (const { line } of known) {
      const [value, more] = describePoint(chart, line, number);
      add(add(row, "td", {}, value), "small", {}, more);
    }
  });
}

/** Open a page that is kept in this one, packed. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return URL.createObjectURL(new Blob([await new Response(stream).text()], { type: "text/html" }));
}

const addresses = new Map();
for (const button of document.querySelectorAll("[data-page]")) {
  button.addEventListener("click", async () => {
    const { page, hash } = button.dataset;
    // At once, since browsers open no window long after the click.
    const opened = window.open("about:blank");
    if (!addresses.has(page)) {
      addresses.set(page, await unpack(document.getElementById(page).textContent));
    }
    opened.location = `${addresses.get(page)}#${hash}`;
  });
}

for (const root of document.querySelectorAll("[data-section]")) {
  const panel = openPanel(root);
  for (const button of document.querySelectorAll(`[data-picks="${root.dataset.section}"]`)) {
    button.addEventListener("click", () => panel.pick(Number(button.dataset.number)));
  }
}
