// ---- the page: its panels and its clock -------------------------------------------------------

const slider = find("#slider");

let panels = [];
let timeline = { stops: [0], rate: 1, find: () => 0 };
let clock = 0;
let target = null;
let lastFrame = null;

const isPlaying = () => target !== null;

/** Make everything again from what is chosen; the clock stays at its stop if `stay`. */
function rebuild(stay = true) {
  showFields();
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
    const where = machine.nodes ? ` of ${plural(machine.nodes.length, "node")}` : "";
    const title = `${name} on ${plural(ranks, "rank")}${where}${cut}`;
    panels[index].load(models[index], title, data.algorithms[name], scales);
  });
  const halves = models.find(({ schedule }) => schedule.halves)?.schedule.halves;
  setText(find("#model"), sayModel(machine, halves));
  wind(stop);
}

function fitPanels(count) {
  const host = find("#panels");
  while (panels.length > count) panels.pop().remove();
  while (panels.length < count) {
    const panel = new Panel(host);
    panel.onStep = (number) =>
      goTo(timeline.stops[controls.mode.value === "steps" ? number
        : findStop(timeline.stops, panel.model.ends[number])]);
    panels.push(panel);
  }
  host.classList.toggle("both", count > 1);
}

/** Take the timeline of what is loaded, at its stop number `stop`. */
function wind(stop) {
  const models = panels.map(({ model }) => model);
  timeline = makeTimeline(models, controls.mode.value, Number(controls.speed.value));
  slider.max = timeline.stops.length - 1;
  slider.disabled = timeline.stops.length === 1;
  goTo(timeline.stops[Math.max(0, Math.min(stop, timeline.stops.length - 1))]);
}

/** The stop of the timeline to come at which the first panel has done as many steps as now. */
function sameStop() {
  const { model, position } = panels[0];
  const done = Math.floor(position);
  if (controls.mode.value === "steps") return done;
  const { stops } = makeTimeline(panels.map((panel) => panel.model), "time", 1);
  return findStop(stops, model.ends[done]);
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
  // Not `disabled`, which would take the focus from the button that was just pressed.
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

// ---- what the reader does --------------------------------------------------------------------

fillChoices();
fillFields();
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
