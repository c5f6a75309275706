// The run: curves of several runs over each other, what the guard found, and the differences of their configs.

const MOST_PANELS = 8; // at first
const ALSO = ["grad_norm", "lr", "tokens_per_second"];

function shownRuns() {
  return store.runs.filter((run) => run.shown);
}

/** What a metric means, from the table of metrics; parts of rewards share an entry. */
function meaningOf(name) {
  const plain = name.replace(/^eval_/, "");
  const entry = (wanted) => overview.metrics.find((metric) => metric.name === wanted);
  const found = entry(name) ?? entry(plain) ?? (plain.startsWith("reward_") ? entry("reward_<part>") : null);
  return found ? `${found.meaning}${found.check ? `. Investigate if ${found.check}` : ""}` : "";
}

/** Names of panels, in the order of the table of metrics: an evaluation is in the panel of its metric. */
function panelNames() {
  const rank = new Map(overview.metrics.map((metric, at) => [metric.name, at]));
  const names = new Set(store.runs.flatMap((run) => [...run.metricNames()].map((name) => name.replace(/^eval_/, ""))));
  const rankOf = (name) => rank.get(name) ?? (name.startsWith("reward_") ? rank.get("reward_<part>") : undefined) ?? 1e6;
  return [...names].sort((a, b) => rankOf(a) - rankOf(b) || a.localeCompare(b));
}

/** The panels that the address names, or the most informative ones. */
function chosenPanels(names) {
  const asked = currentRoute().query.get("m");
  if (asked !== null) return asked.split(",").filter((name) => names.includes(name));
  const machine = new Set(["lr", "tokens_per_second", "generated_per_second", "memory_gib"]);
  const headline = new Set(overview.metrics.filter((metric) => metric.headline && !machine.has(metric.name)).map((metric) => metric.name));
  const main = names.filter((name) => headline.has(name)).slice(0, MOST_PANELS - 2);
  const others = ALSO.filter((name) => names.includes(name)).slice(0, MOST_PANELS - main.length);
  return main.length || others.length ? [...main, ...others] : names.slice(0, MOST_PANELS);
}

function seriesOf(panel) {
  return shownRuns().flatMap((run) => [panel, `eval_${panel}`].flatMap((metric) => {
    const points = run.curve(metric);
    const label = [store.runs.length > 1 ? run.name : "", metric === panel ? "" : "eval"].filter(Boolean).join(" ");
    return points.length ? [{ run: run.index, label, points, dashed: metric !== panel }] : [];
  }));
}

function runView() {
  const names = panelNames();
  const panels = h("div", { class: "panels" });
  const findings = h("div");
  const configs = h("div");
  const head = h("div", { class: "runs" });
  const built = new Map(); // panel name -> Chart
  const pick = (run, step) => openStep(store.runs[run], step);

  function refresh() {
    replace(head, store.runs.map((run) => runLabel(run, refresh)));
    const chosen = chosenPanels(panelNames());
    for (const name of chosen) if (!built.has(name)) built.set(name, new Chart({ title: name, help: meaningOf(name), onPick: pick }));
    const wanted = chosen.map((name) => built.get(name).element);
    if (wanted.length !== panels.children.length || wanted.some((each, at) => each !== panels.children[at])) {
      replace(panels, wanted.length ? wanted : h("p", { class: "note" }, "No metrics yet: this page shows them once a step is logged."));
    }
    const marks = shownRuns().flatMap((run) => run.findings());
    for (const name of chosen) built.get(name).update(seriesOf(name), marks);
    replace(findings, findingsView());
    if (!configs.hasChildNodes()) replace(configs, configView());
  }

  const element = h("div", {}, head, metricChooser(names, refresh), panels, findings, configs);
  return { element, refresh, ready: refresh };
}

/** A click goes to the step, or to the nearest one of which there is a record. */
function openStep(run, step) {
  const recorded = run.nearestStep(step);
  if (recorded === null) return notify(`${run.name} has no recorded steps: rollout.record is off, or nothing was recorded yet`);
  if (recorded !== step) notify(`step ${step} has no record: this is step ${recorded}, the nearest one that has`);
  go(href({ run: run.index, step: recorded }));
}

function runLabel(run, changed) {
  const toggle = h("input", {
    type: "checkbox", checked: run.shown, "aria-label": `show ${run.name}`,
    onchange: (event) => {
      run.shown = event.target.checked;
      changed();
    },
  });
  const facts = [run.algorithm, run.lastStep !== null && `step ${run.lastStep}`, isLive(run) && "live"].filter(Boolean);
  return h("span", { class: "run-label", title: run.folder },
    store.runs.length > 1 && toggle, swatch(run.index), h("b", {}, run.name), h("span", { class: "note" }, facts.join(" · ")),
    stepJump(run));
}

/** Whether the run logged a step in the last minute, while this page was looking. */
function isLive(run) {
  return !embedded && run.seenGrowing && Date.now() - run.grown < 60_000;
}

function stepJump(run) {
  if (!run.steps.length) return h("span", { class: "note" }, "no recorded steps");
  return h("span", { class: "jump" },
    h("a", { class: "button", href: href({ run: run.index, step: run.steps.at(-1) }) }, `open step ${run.steps.at(-1)}`));
}

function metricChooser(names, changed) {
  const chosen = new Set(chosenPanels(names));
  const box = (name) => h("label", { class: "toggle", title: meaningOf(name) }, h("input", {
    type: "checkbox", checked: chosen.has(name),
    onchange: (event) => {
      if (event.target.checked) chosen.add(name);
      else chosen.delete(name);
      remember("m", names.filter((each) => chosen.has(each)).join(","));
      changed();
    },
  }), name);
  return h("details", { class: "chooser" }, h("summary", {}, `metrics (${names.length})`), h("div", { class: "boxes" }, names.map(box)));
}
