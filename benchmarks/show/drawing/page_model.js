// ---- schedules and prices, from what figures.py has found -------------------------------------

// A schedule is {ranks, ends, members, owners?, packed?, steps, states, bound, terms, halves?}. ends has where
// each column begins and the last one ends, in chunks; owners, of what only gathers, has the rank
// that begins with each column; a step is a list of transfers {src, dst, lo, hi,
// reduce} of columns. A state has for each rank and column the ranks whose contributions are in it,
// in the order in which they were added; null for nothing. halves has the ranks of the two parts
// that a two-level schedule has made where no nodes were given.
// A machine is {between, inside, addition, size, nodes}: two links {latency, secondsPerByte},
// seconds for an added byte, bytes of the buffer, and the ranks of each node, or null for one
// rank on each.

const range = (count) => Array.from({ length: count }, (_, index) => index);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const greatest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);

const contributors = ({ owners, members }, column) =>
  owners ? [owners[column % owners.length]] : members;

function unpack(ranks, packed) {
  const { ends, sums, changes } = packed;
  const columns = ends.length - 1;
  const values = range(ranks).map((rank) => [rank]);
  for (const parts of sums) values.push(parts.flatMap((part) => values[part]));
  const states = [range(ranks).map((rank) => range(columns).map((column) =>
    contributors(packed, column).includes(rank) ? values[rank] : null))];
  for (const cells of changes) {
    const next = states.at(-1).map((row) => row.slice());
    for (let place = 0; place < cells.length; place += 2) {
      next[Math.floor(cells[place] / columns)][cells[place] % columns] = values[cells[place + 1]];
    }
    states.push(next);
  }
  const transfer = ([src, dst, lo, hi, reduce]) => ({ src, dst, lo, hi, reduce: reduce === 1 });
  const steps = packed.steps.map((flat) =>
    range(flat.length / 5).map((number) => transfer(flat.slice(5 * number, 5 * number + 5))));
  return { ...packed, ranks, steps, states };
}

/** The buffer in `count` parts, each of which shows what the part before it showed a step ago. */
function pipeline(schedule, count) {
  const { ends, steps, states } = schedule;
  const columns = ends.length - 1;
  const parts = range(steps.length === 0 ? 1 : count);
  const length = steps.length + parts.length - 1;
  const move = (transfer, by) => ({ ...transfer, lo: transfer.lo + by, hi: transfer.hi + by });
  const find = (number) => states[Math.max(0, Math.min(number, steps.length))];
  return {
    ...schedule,
    ends: [0, ...parts.flatMap((part) => ends.slice(1).map((end) => end + part * ends.at(-1)))],
    steps: range(length).map((number) => parts.flatMap((part) =>
      (steps[number - part] ?? []).map((transfer) => move(transfer, part * columns)))),
    states: range(length + 1).map((number) => range(schedule.ranks).map((rank) =>
      parts.flatMap((part) => find(number - part)[rank]))),
  };
}

/** How many of the chunks a transfer has. */
const width = ({ ends }, { lo, hi }) => ends[hi] - ends[lo];

/** A step's transfers with their number of chunks; all between two ranks as one, if packed. */
function listMessages(schedule, step) {
  const messages = new Map();
  step.forEach((transfer, place) => {
    const { src, dst, reduce } = transfer;
    const key = schedule.packed ? `${src} ${dst} ${reduce}` : place;
    const chunks = (messages.get(key)?.chunks ?? 0) + width(schedule, transfer);
    messages.set(key, { src, dst, reduce, chunks });
  });
  return [...messages.values()];
}

/** Bytes and messages from each rank to each rank in the first `steps` steps. */
function countLinks(schedule, size, steps) {
  const empty = () => ({ bytes: 0, messages: 0 });
  const links = range(schedule.ranks).map(() => range(schedule.ranks).map(empty));
  for (const step of schedule.steps.slice(0, steps)) {
    for (const { src, dst, chunks } of listMessages(schedule, step)) {
      links[src][dst].bytes += chunks * size / schedule.ends.at(-1);
      links[src][dst].messages += 1;
    }
  }
  return links;
}

/** What each step takes: of the loads that decide, the one that takes longest. */
function price({ ends }, terms, { between, inside, addition, size }) {
  const chunk = size / ends.at(-1);
  const take = ([far, volume, added, near = 0, inner = 0]) =>
    far * between.latency + near * inside.latency + chunk * (volume * between.secondsPerByte
      + inner * inside.secondsPerByte + added * addition);
  return terms.map((place) => {
    const [messages, busiest, ...loads] = data.terms[place];
    return { seconds: greatest(loads.map(take)), messages, busiest: busiest * chunk };
  });
}

/** What no algorithm can beat. */
function limit([near, far, inner, volume, added], { between, inside, addition, size }) {
  const latency = Math.max(near * inside.latency, far * between.latency);
  const bandwidth = size
    * Math.max(inner * inside.secondsPerByte, volume * between.secondsPerByte);
  const adding = added * size * addition;
  const seconds = Math.max(latency, bandwidth, adding);
  return { latency, bandwidth, addition: adding, seconds };
}

/** All that a panel shows; nodes are those that it marks. */
function makeModel(whole, segments, machine) {
  const schedule = pipeline(whole, segments);
  const prices = price(schedule, whole.terms[segments], machine);
  const ends = [0];
  for (const { seconds } of prices) ends.push(ends.at(-1) + seconds);
  const nodes = machine.nodes ?? whole.halves;
  const { states } = schedule;
  return { schedule, states, prices, ends, bound: limit(whole.bound, machine), size: machine.size,
    nodes };
}
