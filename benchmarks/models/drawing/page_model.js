// ---- schedules: what schedule.py and replay.py say, as pure functions -------------------------

// A schedule is {ranks, chunks, members, steps, halves?, ends?}, a step a list of transfers
// {src, dst, lo, hi, reduce}. ends has where each column begins, once chunks are merged; halves
// the ranks of the two parts that a two-level schedule has made where no nodes were given.

/** Bytes of an element: float32. */
const ITEM = 4;

const range = (count) => Array.from({ length: count }, (_, index) => index);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const greatest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);

/** The schedule that page.py has packed: each step flat, five integers for a transfer. */
function unpack(ranks, packed) {
  const transfer = ([src, dst, lo, hi, reduce]) => ({ src, dst, lo, hi, reduce: reduce === 1 });
  const steps = packed.steps.map((flat) =>
    range(flat.length / 5).map((number) => transfer(flat.slice(5 * number, 5 * number + 5))));
  const { chunks, members = range(ranks), halves = null } = packed;
  return { ranks, chunks, members, steps, halves };
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

/** How many of the chunks a transfer has. */
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

/** Bytes of one transfer of a buffer of `size` bytes, whose chunks hold whole elements. */
function weigh({ chunks, ends }, { lo, hi }, size) {
  const count = Math.floor(size / ITEM);
  const whole = ends ? ends.at(-1) : chunks;
  const start = (column) => {
    const product = count * (ends ? ends[column] : column);
    return (product - product % whole) / whole;
  };
  return ITEM * (start(hi) - start(lo));
}

/** Bytes and messages from each rank to each rank in the first `steps` steps. */
function countLinks(schedule, size, steps) {
  const empty = () => ({ bytes: 0, messages: 0 });
  const links = range(schedule.ranks).map(() => range(schedule.ranks).map(empty));
  for (const transfer of schedule.steps.slice(0, steps).flat()) {
    const link = links[transfer.src][transfer.dst];
    const bytes = weigh(schedule, transfer, size);
    link.bytes += bytes;
    link.messages += bytes > 0;
  }
  return links;
}
