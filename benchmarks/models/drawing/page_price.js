// ---- prices: what cost.py says, and when steps end --------------------------------------------

// A machine is {between, inside, addition, size, nodes}: two links {latency, secondsPerByte},
// seconds for an added byte, bytes of the buffer, and the ranks of each node, or null for one
// rank on each. The ranks of a node share a link to the network with the bandwidth of `between`.

const hostsOf = (ranks, { nodes }) => nodes ?? Array(ranks).fill(1);

/**
 * What each step takes: the slowest rank's sending or receiving or its node's link, whichever is
 * longest, and then its adding.
 */
function price(schedule, machine) {
  const hosts = hostsOf(schedule.ranks, machine);
  const home = hosts.flatMap((count, node) => Array(count).fill(node));
  return schedule.steps.map((step) => {
    const made = step.map((transfer) => ({
      ...transfer,
      bytes: weigh(schedule, transfer, machine.size),
      far: home[transfer.src] !== home[transfer.dst],
    })).filter(({ bytes }) => bytes > 0);
    return priceStep(made, schedule.ranks, machine, waitForLinks(made, home, machine));
  });
}

function priceStep(step, ranks, machine, waiting) {
  const zeros = () => Array(ranks).fill(0);
  const [sending, receiving, adding, sent, received] = range(5).map(zeros);
  for (const { src, dst, reduce, bytes, far } of step) {
    const { latency, secondsPerByte } = far ? machine.between : machine.inside;
    const seconds = latency + bytes * secondsPerByte;
    sending[src] += seconds;
    receiving[dst] += seconds;
    adding[dst] += reduce ? bytes * machine.addition : 0;
    sent[src] += bytes;
    received[dst] += bytes;
  }
  const busy = range(ranks).map((rank) =>
    Math.max(sending[rank], receiving[rank], waiting[rank]) + adding[rank]);
  return {
    seconds: greatest(busy),
    messages: step.length,
    sent: sum(sent),
    busiest: Math.max(greatest(sent), greatest(received)),
  };
}

/** For each rank, how long its node's link is busy in the direction in which the rank uses it. */
function waitForLinks(step, home, { between }) {
  const zeros = () => Array(home.length).fill(0);
  const [leaving, entering, waiting] = range(3).map(zeros);
  const distant = step.filter(({ far }) => far);
  for (const { src, dst, bytes } of distant) {
    leaving[home[src]] += bytes;
    entering[home[dst]] += bytes;
  }
  const wait = (rank, bytes) => {
    const seconds = between.latency + bytes * between.secondsPerByte;
    waiting[rank] = Math.max(waiting[rank], seconds);
  };
  for (const { src, dst } of distant) {
    wait(src, leaving[home[src]]);
    wait(dst, entering[home[dst]]);
  }
  return waiting;
}

/** How often 1 is to be multiplied to reach `count`. */
function countRounds(count, factor) {
  let rounds = 0;
  for (let reached = 1; reached < count; reached *= factor) rounds += 1;
  return rounds;
}

/**
 * What no all-reduce can beat, as cost.bound has it. A node of m ranks hears m others at once.
 * Dedicated servers may help: then members must only send the buffer once and receive it once,
 * which may be at the same time.
 */
function bound({ ranks, members }, machine) {
  const { between, inside, size } = machine;
  if (size === 0) return { latency: 0, bandwidth: 0, addition: 0, seconds: 0 };
  const hosts = hostsOf(ranks, machine);
  const count = members.length;
  const nearest = greatest(hosts) === 1 ? between : inside;
  const addition = (count - 1) / ranks * size * machine.addition;
  let latency = countRounds(count, 2) * nearest.latency;
  let bandwidth = (count > 1 ? size : 0) * nearest.secondsPerByte;
  if (count === ranks) {
    const far = countRounds(hosts.length, 1 + greatest(hosts)) * between.latency;
    const port = (ranks - 1) / ranks * nearest.secondsPerByte;
    const link = (hosts.length - 1) / hosts.length * between.secondsPerByte;
    latency = Math.max(latency, far);
    bandwidth = 2 * size * Math.max(port, link);
  }
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

/** What part of a moment two ends may differ by to be one stop: chunks differ by an element. */
const TOGETHER = 1e-5;

/** The number of the stop that an end has become. */
const findStop = (stops, end) => stops.findLastIndex((stop) => stop <= end * (1 + TOGETHER));

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
    if (stops.length > 0 && end - stops.at(-1) <= TOGETHER * end) stops[stops.length - 1] = end;
    else stops.push(end);
  }
  const seconds = Math.min(60, Math.max(longest, 2) * pace);
  return { stops, rate: stops.at(-1) / seconds, find: (model, clock) => locate(model.ends, clock) };
}

/** All that a panel shows; nodes are those that it marks. */
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
    nodes: machine.nodes ?? merged.halves,
  };
}
