// ---- the settings: what is chosen, which machine, and the address that holds both -------------

const MICROSECOND = 1e-6;
const SECONDS_PER_BYTE = 8e-9;  // at 1 Gbit/s
const SECONDS_PER_ADDED_BYTE = 1e-9;  // at 1 GB/s
const MEBIBYTE = 2 ** 20;

const data = JSON.parse(find("#data").textContent);
const form = find("#settings");
const controls = form.elements;

const offered = (ranks, name) => data.schedules[ranks]?.[name];
/** The ranks of each node, where nodes were given for so many ranks. */
const givenNodes = (ranks) => data.nodes[ranks] ?? null;
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
  for (const list of [controls.firstSegments, controls.secondSegments]) {
    list.append(...data.segments.map((count) => option(count)));
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
    limitSegments(counts, offered(ranks, list.value));
  }
}

function limitSegments(counts, { terms }) {
  for (const option of counts.options) option.disabled = !(option.value in terms);
  if (!counts.selectedOptions[0].disabled) return;
  counts.value = [...counts.options].findLast((option) => !option.disabled).value;
}

/** The fields that hold; those of links inside nodes do where there are nodes. */
function listFields() {
  const fields = Object.keys(data.fields).map((name) => controls[name]);
  return fields.filter((field) => field.closest("[hidden]") === null);
}

function fillFields() {
  for (const [name, { value, min, max }] of Object.entries(data.fields)) {
    Object.assign(controls[name], { min, max, value });
  }
}

function showFields() {
  const hidden = givenNodes(controls.ranks.value) === null;
  for (const part of form.querySelectorAll("[data-nodes]")) part.hidden = hidden;
}

/** What is wrong with the fields: pairs of a field and a sentence. */
function findProblems() {
  const name = (field) => field.labels[0].innerText.trim();
  const wrong = listFields().filter((field) => !field.checkValidity());
  if (wrong.length > 0 || givenNodes(controls.ranks.value) === null) {
    return wrong.map((field) =>
      [field, `${name(field)} must be a number from ${field.min} to ${field.max}.`]);
  }
  const { latency, bandwidth, insideLatency, insideBandwidth } = controls;
  const problems = [];
  if (insideLatency.valueAsNumber > latency.valueAsNumber) {
    problems.push([insideLatency, `${name(insideLatency)} must not be above ${latency.value}, `
      + "the latency between nodes."]);
  }
  if (insideBandwidth.valueAsNumber < bandwidth.valueAsNumber) {
    problems.push([insideBandwidth, `${name(insideBandwidth)} must not be below `
      + `${bandwidth.value}, the bandwidth between nodes.`]);
  }
  return problems;
}

/** The machine that the fields describe; null, and a word about it, where they cannot be. */
function readMachine() {
  const problems = findProblems();
  const wrong = problems.map(([field]) => field);
  listFields().forEach((field) => field.setAttribute("aria-invalid", wrong.includes(field)));
  setText(find("#problem"), problems.map(([, sentence]) => sentence).join(" "));
  if (wrong.length > 0) return null;
  const nodes = givenNodes(controls.ranks.value);
  const size = controls.size.valueAsNumber * MEBIBYTE;
  // Nothing is not sent, and takes no time.
  const link = (latency, bandwidth) => ({
    latency: size > 0 ? latency.valueAsNumber * MICROSECOND : 0,
    secondsPerByte: SECONDS_PER_BYTE / bandwidth.valueAsNumber,
  });
  const between = link(controls.latency, controls.bandwidth);
  return {
    between,
    inside: nodes ? link(controls.insideLatency, controls.insideBandwidth) : between,
    addition: SECONDS_PER_ADDED_BYTE / controls.additions.valueAsNumber,
    size,
    nodes,
  };
}

function readPanels() {
  return choices().filter(([list]) => list.value !== "").map(([list, counts]) =>
    ({ name: list.value, segments: Number(counts.value) }));
}

let kept = "";

/** Write what is chosen into the address. */
function keep() {
  const chosen = [...controls].filter((control) =>
    control.name && !control.disabled && control.closest("[hidden]") === null);
  const pairs = chosen.map(({ name, value }) => [name, value]);
  kept = `#${new URLSearchParams([...pairs, ["at", countStops()]])}`;
  history.replaceState(null, "", kept);
}

/** Read it back; what it does not say, or what cannot be, stays as it is. */
function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const before = Object.keys(data.fields).map((name) => [controls[name], controls[name].value]);
  for (const [name, value] of wanted) {
    const control = controls.namedItem(name);
    if (control === null) continue;
    const old = control.value;
    control.value = value;
    const isList = control.tagName === "SELECT";
    const possible = isList ? control.selectedIndex >= 0 : control.checkValidity();
    if (!possible) control.value = old;
  }
  showFields();
  if (findProblems().length > 0) for (const [field, value] of before) field.value = value;
  const stop = Number(wanted.get("at"));
  rebuild(false);
  wind(Number.isInteger(stop) ? stop : 0);
}
