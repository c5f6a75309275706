// Curves as SVG: values as they were logged, without smoothing. Runs differ in colour, in dashes and in the mark of their
// points. The step under the pointer is shown in all charts at once; a click opens it.

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 5", "12 4"];
const FEW = 40; // up to this number, points are marked
const HEIGHT = 190;
const MARGIN = { top: 10, right: 12, bottom: 26, left: 50 };
const charts = new Set(); // on the page, so that all show the same step

/** The outline of a mark around a point; its number is that of the run. */
function markPath(number, x, y, size) {
  const r = size;
  const shapes = [
    `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    `M${x},${y - r * 1.2}L${x + r * 1.2},${y + r}H${x - r * 1.2}z`,
    `M${x},${y - r * 1.4}L${x + r * 1.4},${y}L${x},${y + r * 1.4}L${x - r * 1.4},${y}z`,
    `M${x - r},${y - r}l${2 * r},${2 * r}M${x + r},${y - r}l${-2 * r},${2 * r}`,
    `M${x},${y - r * 1.3}v${r * 2.6}M${x - r * 1.3},${y}h${r * 2.6}`,
  ];
  return shapes[number % shapes.length];
}

/** A line and a mark, as in the charts. */
function swatch(number) {
  return s("svg", { class: `swatch run-${number}`, width: 34, height: 12, "aria-hidden": "true" },
    s("path", { class: "line", d: "M1,6H33", "stroke-dasharray": DASHES[number] }),
    s("path", { class: "mark", d: markPath(number, 17, 6, 3.2) }));
}

/** Of many points the lowest and the highest in each pixel: what a line through all of them would cover. */
function thinned(points, x, width) {
  if (points.length <= 2 * width) return points;
  const kept = [];
  let column = [];
  const flush = () => {
    if (!column.length) return;
    const gap = column.find(([, value]) => !isNumber(value));
    const numbers = column.filter(([, value]) => isNumber(value)).sort((a, b) => a[1] - b[1]);
    const ends = numbers.length > 2 ? [numbers[0], numbers.at(-1)] : numbers;
    kept.push(...ends.sort((a, b) => a[0] - b[0]), ...(gap ? [gap] : []));
    column = [];
  };
  for (const point of points) {
    if (column.length && Math.floor(x(point[0])) !== Math.floor(x(column[0][0]))) flush();
    column.push(point);
  }
  flush();
  return kept;
}

/** One panel: {title, help, series: [{run, label, points, dashed}], marks: [{step, state, message, run}]}. */
class Chart {
  constructor({ title, help = "", onPick = null }) {
    Object.assign(this, { title, onPick, series: [], marks: [], steps: [], step: null });
    this.readout = h("span", { class: "readout" });
    this.svg = s("svg", { class: "chart", tabindex: onPick ? 0 : null, role: "img", height: HEIGHT });
    this.element = h("figure", { class: "panel", "data-metric": title },
      h("figcaption", {}, h("b", { title: help || null }, title), this.readout), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => showStep(null));
    this.svg.addEventListener("click", (event) => this.pick(event));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.size = new ResizeObserver(() => this.element.isConnected && this.draw());
    this.size.observe(this.element);
    charts.add(this);
  }

  update(series, marks = []) {
    const steps = new Set(series.flatMap((each) => each.points.map(([step]) => step)));
    Object.assign(this, { series, marks, steps: [...steps].sort((a, b) => a - b) });
    this.draw();
  }

  draw() {
    const width = Math.max(220, Math.floor(this.element.clientWidth) - 2);
    const points = this.series.flatMap((each) => each.points);
    const steps = extent(points.map(([step]) => step)) ?? [0, 1];
    const values = extent(points.map(([, value]) => value)) ?? [0, 1];
    const room = (values[1] - values[0]) * 0.06;
    this.width = width;
    this.x = scale(...steps, MARGIN.left, width - MARGIN.right);
    this.y = scale(values[0] - room, values[1] + room, HEIGHT - MARGIN.bottom, MARGIN.top);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.cross = s("g", { class: "cross" });
    replace(this.svg, this.axes(steps, values), this.series.map((each) => this.line(each)), this.findings(), this.cross);
    this.describe();
    this.show(this.step);
  }

  axes(steps, values) {
    const horizontal = ticks(...values, 4).map((value) => s("g", {},
      s("path", { class: "grid", d: `M${MARGIN.left},${this.y(value)}H${this.width - MARGIN.right}` }),
      s("text", { class: "tick", x: MARGIN.left - 6, y: this.y(value) + 4, "text-anchor": "end" }, short(value))));
    const vertical = ticks(...steps, Math.min(8, this.width / 70), true).map((step) =>
      s("text", { class: "tick", x: this.x(step), y: HEIGHT - 6, "text-anchor": "middle" }, short(step)));
    const floor = HEIGHT - MARGIN.bottom;
    return s("g", {}, horizontal, vertical,
      s("path", { class: "axis", d: `M${MARGIN.left},${floor}H${this.width - MARGIN.right}` }));
  }

  line({ run, points, dashed }) {
    const kept = thinned(points, this.x, this.width);
    let pen = "M";
    const path = kept.map(([step, value]) => {
      if (!isNumber(value)) {
        pen = "M";
        return "";
      }
      const to = `${pen}${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`;
      pen = "L";
      return to;
    });
    const marked = points.length <= FEW ? points.filter(([, value]) => isNumber(value)) : [];
    const marks = marked.map(([step, value]) => markPath(run, this.x(step), this.y(value), 2.6)).join("");
    return s("g", { class: `run-${run}` },
      s("path", { class: "line", d: path.join(""), "stroke-dasharray": dashed ? "3 3" : DASHES[run] }),
      marks && s("path", { class: dashed ? "mark hollow" : "mark", d: marks }));
  }

  /** What the guard found, on the axis: a triangle for a warning, a cross for a failure. */
  findings() {
    const floor = HEIGHT - MARGIN.bottom;
    return this.marks.filter(({ step }) => isNumber(this.x(step))).map(({ step, state, message }) => {
      const [x, failed] = [this.x(step), state === "failed"];
      return s("g", { class: `finding ${state}` },
        s("path", { class: "stem", d: `M${x},${MARGIN.top}V${floor}` }),
        s("path", { class: "sign", d: markPath(failed ? 4 : 2, x, floor, 5) }),
        s("title", {}, `step ${step}, ${state}: ${message}`));
    });
  }

  describe() {
    const summary = this.series.map(({ label, points }) => {
      const numbers = points.map(([, value]) => value).filter(isNumber);
      const [low, high] = extent(numbers) ?? [];
      return numbers.length ? `${label}: last ${short(numbers.at(-1))}, lowest ${short(low)}, highest ${short(high)}` : label;
    });
    this.svg.setAttribute("aria-label", `${this.title}. ${summary.join(". ")}`);
  }

  /** The values at a step, or the last ones. */
  show(step) {
    this.step = step;
    if (!this.cross) return;
    const at = this.series.map((each) => ({ ...each, point: step === null ? each.points.at(-1) : nearest(each.points, step) }));
    const known = at.filter(({ point }) => point);
    replace(this.readout, known.map((each) => readoutOf(each, step, this.series.length > 1)));
    if (step === null) return void replace(this.cross);
    replace(this.cross,
      s("path", { class: "stem", d: `M${this.x(step)},${MARGIN.top}V${HEIGHT - MARGIN.bottom}` }),
      known.filter(({ point }) => isNumber(point[1])).map(({ run, point }) =>
        s("path", { class: `mark run-${run}`, d: markPath(run, this.x(point[0]), this.y(point[1]), 4) })));
  }

  stepAt(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    return nearest(this.steps.map((step) => [step, 0]), null, (step) => Math.abs(this.x(step) - x))?.[0] ?? null;
  }

  point(event) {
    showStep(this.stepAt(event));
  }

  pick(event) {
    const step = this.stepAt(event);
    if (step === null || !this.onPick) return;
    const y = event.clientY - this.svg.getBoundingClientRect().top;
    const distance = ({ points }) => {
      const point = nearest(points, step);
      return point && isNumber(point[1]) ? Math.abs(this.y(point[1]) - y) : Infinity;
    };
    const closest = this.series.reduce((best, each) => (best && distance(best) <= distance(each) ? best : each), null);
    this.onPick(closest?.run ?? 0, step);
  }

  key(event) {
    const { steps } = this;
    const at = this.step === null ? steps.length : steps.indexOf(this.step);
    if (event.key === "Enter" && this.step !== null && this.onPick) this.onPick(this.series[0].run, this.step);
    else if (event.key === "ArrowLeft") showStep(steps[Math.max(0, at - 1)] ?? null);
    else if (event.key === "ArrowRight") showStep(steps[Math.min(steps.length - 1, at + 1)] ?? null);
    else return;
    event.preventDefault();
  }
}

/** The value of a curve, with the mark of its points. */
function readoutOf({ run, label, dashed, point: [where, value] }, step, marked) {
  const mark = marked && s("svg", { width: 11, height: 10, "aria-hidden": "true" },
    s("path", { class: dashed ? "mark hollow" : "mark", d: markPath(run, 5, 5, 2.8) }));
  const elsewhere = step !== null && where !== step ? ` (step ${where})` : "";
  return h("span", { class: `value run-${run}`, title: label }, mark, ` ${short(value)}${elsewhere}`);
}

function nearest(points, step, distance = (each) => Math.abs(each - step)) {
  return points.reduce((best, each) => (best && distance(best[0]) <= distance(each[0]) ? best : each), null);
}

function showStep(step) {
  for (const chart of charts) {
    if (chart.element.isConnected) chart.show(step);
  }
}

/** Forget the charts of views that were left. */
function dropCharts() {
  for (const chart of charts) {
    if (chart.element.isConnected || chart.svg.hasChildNodes() === false) continue;
    chart.size.disconnect();
    charts.delete(chart);
  }
}
