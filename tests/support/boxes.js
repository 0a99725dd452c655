/**
 * What cannot be read on a page, in words: texts over texts, cut off, covered, beyond the page, or
 * with little contrast. Texts in what scrolls may go on beyond its edge. The window must be as high
 * as the page.
 */
/** Pixels; of text the least contrast (WCAG 2.2, 1.4.3). */
const SLACK = 1.5, LEAST_HEIGHT = 9, LEAST_CONTRAST = 4.5;
const page = document.documentElement;
const SVG = "http://www.w3.org/2000/svg";
const problems = [];
const show = (node) => `“${node.textContent.trim().replace(/\s+/g, " ").slice(0, 40)}”`;

// ---- boxes ------------------------------------------------------------------------------------

/** Of drawings whose letters are outlines each text is a group; of others, each node of text. */
function listTexts() {
  const outlines = [...document.querySelectorAll("svg g[id^=text_]")]
    .filter((group) => !group.querySelector("text"))
    .map((group) => ({ node: group, element: group, name: `“${
      [...group.childNodes].find(({ nodeType }) => nodeType === 8)?.data.trim() ?? group.id}”`,
      rects: [group.getBoundingClientRect()] }));
  const walker = document.createTreeWalker(page, NodeFilter.SHOW_TEXT), texts = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (node.data.trim() === "" || element.closest("script, style, title, option, template, .hidden")
      || !element.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = element.namespaceURI === SVG ? [element.getBoundingClientRect()]
      : [...range.getClientRects()];
    texts.push({ node, element, name: show(node), rects });
  }
  return [...outlines, ...texts];
}

/** What is seen of a rectangle; null if nothing is, as of what was scrolled away. */
function clip(rect, element, name) {
  let { left, right, top, bottom } = rect;
  for (let box = element; box; box = box.parentElement) {
    const style = getComputedStyle(box);
    const isDrawing = box.namespaceURI === SVG && box.tagName === "svg";
    if (!isDrawing && style.overflowX === "visible" && style.overflowY === "visible") continue;
    if (box === page || box === document.body) continue;
    const edge = box.getBoundingClientRect();
    const scrolls = ["auto", "scroll"].includes(style.overflowX);
    const isOut = right <= edge.left + SLACK || left >= edge.right - SLACK
      || bottom <= edge.top + SLACK || top >= edge.bottom - SLACK;
    if (isOut && !isDrawing) return null;
    const middle = (top + bottom) / 2, half = (bottom - top) / 4;
    const isCut = left < edge.left - SLACK || right > edge.right + SLACK
      || middle - half < edge.top - SLACK || middle + half > edge.bottom + SLACK;
    if (isCut && !scrolls) problems.push(`cut off: ${name}`);
    [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
    [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
  }
  if (left < -SLACK || right > page.clientWidth + SLACK) problems.push(`beyond the page: ${name}`);
  return { left, right, top, bottom };
}

const found = [];
for (const { node, element, name, rects } of listTexts()) {
  for (const rect of rects) {
    if (rect.width === 0 || rect.height === 0) continue;
    if (rect.height < LEAST_HEIGHT && element.tagName !== "g") {
      problems.push(`${rect.height.toFixed(1)} px high: ${name}`);
    }
    const seen = clip(rect, element, name);
    if (seen === null || seen.right - seen.left < SLACK) continue;
    // Letters fill about the middle of their line.
    const margin = 0.2 * (seen.bottom - seen.top);
    found.push({ node, element, name, ...seen, top: seen.top + margin,
      bottom: seen.bottom - margin });
  }
}
found.sort((one, other) => one.top - other.top);
found.forEach((one, number) => {
  for (const other of found.slice(number + 1)) {
    if (other.top >= one.bottom) break;
    const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const down = Math.min(one.bottom, other.bottom) - other.top;
    if (one.node !== other.node && across > SLACK && down > SLACK) {
      problems.push(`${one.name} over ${other.name}`);
    }
  }
});
if (page.scrollWidth > page.clientWidth) problems.push(`the page is ${page.scrollWidth} wide`);

// ---- colours ----------------------------------------------------------------------------------

const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const known = new Map();
function read(colour) {
  if (!known.has(colour)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = "transparent";
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
  }
  return known.get(colour);
}

const luminance = (colour) => colour.slice(0, 3).map((value) => value / 255)
  .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
  .reduce((total, value, index) => total + value * [0.2126, 0.7152, 0.0722][index], 0);

/** What an element paints where it is, with how much of it covers what is behind. */
function paint(element) {
  const style = getComputedStyle(element);
  if (element.namespaceURI !== SVG) return read(style.backgroundColor);
  if (!["rect", "path", "polygon"].includes(element.tagName) || style.fill === "none") {
    return [0, 0, 0, 0];
  }
  const colour = read(style.fill);
  return [...colour.slice(0, 3), colour[3] * style.fillOpacity * style.opacity];
}

function findBackground({ element, left, right, top, bottom }) {
  const stack = document.elementsFromPoint((left + right) / 2, (top + bottom) / 2);
  const from = stack.indexOf(element);
  const isCovered = from < 0 || stack.slice(0, from)
    .some((each) => each.namespaceURI !== SVG && !element.contains(each) && paint(each)[3] > 0);
  const below = from < 0 ? [] : stack.slice(from);
  let colour = [0, 0, 0], uncovered = 1;
  for (const each of [...below, page]) {
    const [red, green, blue, alpha] = paint(each);
    const share = uncovered * alpha / 255;
    colour = colour.map((value, at) => value + share * [red, green, blue][at]);
    uncovered -= share;
  }
  // Where nothing is painted the browser's own page is.
  const base = read("Canvas");
  return { isCovered, colour: colour.map((value, at) => value + uncovered * base[at]) };
}

for (const each of found) {
  const { element, name } = each;
  if (element.tagName === "g" || element.closest(":disabled, [aria-disabled=true]")) continue;
  const style = getComputedStyle(element), isDrawn = element.namespaceURI === SVG;
  const { isCovered, colour } = findBackground(each);
  if (isCovered) {
    if (!isDrawn) problems.push(`covered: ${name}`);
    if (!isDrawn) continue;
  }
  const hasHalo = isDrawn && style.paintOrder.startsWith("stroke") && style.stroke !== "none";
  const behind = hasHalo ? read(style.stroke) : colour;
  const [one, other] = [read(isDrawn ? style.fill : style.color), behind].map(luminance);
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < LEAST_CONTRAST) problems.push(`contrast ${ratio.toFixed(1)}: ${name}`);
}
return { texts: found.length, problems: [...new Set(problems)] };
