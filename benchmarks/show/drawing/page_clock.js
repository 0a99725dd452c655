// ---- the clock: when steps end --------------------------------------------------------------

/** How many steps are over at `time`; the fraction is that of the step under way. */
function locate(ends, time) {
  const done = ends.findLastIndex((end) => end <= time);
  if (done === ends.length - 1) return done;
  return done + (time - ends[done]) / (ends[done + 1] - ends[done]);
}

/** What part of a moment two ends may differ by and still be one stop: rounding. */
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
