// Numbers to text, and the few statistics that the page shows.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** At most four digits, as on the console: 0.1235, 1.20e-4, 12,345. */
function short(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1);
const plural = (count, noun) => `${short(count)} ${noun}${count === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

function deviation(values) {
  if (!values.length) return null;
  const middle = mean(values);
  return Math.sqrt(mean(values.map((value) => (value - middle) ** 2)));
}

/** [lowest, highest] without a spread operator, which fails on long arrays; null without numbers. */
function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

/** The value below which this share of the values lies. */
function quantile(values, share) {
  const ordered = values.filter(isNumber).sort((a, b) => a - b);
  return ordered.length ? ordered[Math.min(ordered.length - 1, Math.floor(share * ordered.length))] : null;
}

/** Round numbers between two ends, about `count` of them. */
function ticks(low, high, count, whole = false) {
  if (low === high) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

/** A function from [low, high] to [from, to]; equal ends give the middle. */
function scale(low, high, from, to) {
  return (value) => (high > low ? from + ((value - low) / (high - low)) * (to - from) : (from + to) / 2);
}
