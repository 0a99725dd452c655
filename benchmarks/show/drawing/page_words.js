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

/** Three figures and a unit, as the terminal has it. */
const sayTime = (seconds) => seconds >= 999.5 ? `${Math.round(seconds).toLocaleString("en")} s`
  : scale(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);

/** Four figures and a unit, as the terminal has it. */
function sayBytes(exact) {
  const bytes = Math.round(exact);
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const [factor, unit] = units.find(([factor]) => bytes >= factor) ?? units.at(-1);
  return `${Number((bytes / factor).toPrecision(4))} ${unit}`;
}

/** "3 ranks", or "1, 2 and 5 ranks". */
function saySizes(nodes) {
  if (new Set(nodes).size === 1) return plural(nodes[0], "rank");
  return `${nodes.slice(0, -1).join(", ")} and ${nodes.at(-1)} ranks`;
}

/** Which model the prices come from: where links differ, and what decides how long a step takes. */
function sayModel({ nodes }, halves) {
  const shared = nodes?.length > 1;
  const step = "A step takes as long as its slowest rank: the greater of its sending and its "
    + `receiving, one message after the other (latency + bytes / bandwidth),${shared
      ? " or its node's link if that is slower," : ""} and then its adding. Steps do not overlap. `
    + "All chunks count as equally large.";
  return `${sayLinks(nodes, halves)} ${step}`;
}

function sayLinks(nodes, halves) {
  if (nodes?.length === 1) {
    return `Prices are for one node of ${saySizes(nodes)}: all links are inside it.`;
  }
  if (nodes) {
    return `Prices are for ${nodes.length} nodes of ${saySizes(nodes)}, whichever algorithm is `
      + "shown. Links inside nodes and between them differ, and the ranks of a node share one "
      + "link to the network, with the bandwidth between nodes in each direction.";
  }
  if (halves) {
    return `Nodes of ${saySizes(halves)} are marked, but every pair of ranks has the same link `
      + "here, as if there were one rank on each node.";
  }
  return "Every pair of ranks has the same link.";
}

/** What a step does, in one sentence without its full stop. */
function describe(schedule, transfers) {
  if (transfers.length === 0) return "nothing moves";
  const step = listMessages(schedule, transfers);
  const widths = new Set(step.map((message) => message.chunks));
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
  const load = sayBytes(most);
  const busy = used.filter(({ bytes }) => sayBytes(bytes) === load);
  if (busy.length === used.length && used.length > 1) {
    return `All ${used.length} links in use have sent ${load} each.`;
  }
  const more = busy.length > 1 ? ` and ${busy.length - 1} more` : "";
  return `Busiest: rank ${busy[0].src} to rank ${busy[0].dst}${more}, ${load}`
    + `${more ? " each" : ""}, of ${plural(used.length, "link")} in use.`;
}
