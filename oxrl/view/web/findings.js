// What the guard found, and what the configs have: the parts of the run's view that are not curves.

const SIGNS = { failed: "✕", warned: "▲", passed: "✓", skipped: "–" };

/** Findings of all shown runs, and how many checks passed. */
function findingsView() {
  const rows = shownRuns().flatMap((run) => run.findings().map((finding) => ({ run, ...finding })));
  const passed = shownRuns().flatMap((run) => run.checks.rows.filter(({ state }) => state === "passed"));
  const names = new Set(passed.map(({ check }) => check));
  if (!rows.length && !names.size) return null;
  return h("section", { class: "findings" }, h("h2", {}, "Checks"),
    rows.map(findingView),
    names.size ? h("details", {}, h("summary", {}, `✓ ${plural(names.size, "check")} passed`), h("p", { class: "note" }, [...names].join(", "))) : null);
}

function findingView({ run, step, check, state, message, remedy }) {
  const near = run.nearestStep(step);
  const where = near === null ? h("span", {}, `step ${step}`) : h("a", { href: href({ run: run.index, step: near }) }, `step ${step}`);
  return h("div", { class: `finding-row ${state}` },
    chip(`${SIGNS[state] ?? "?"} ${state}`, state === "failed" ? "bad" : "warn"),
    h("div", {}, store.runs.length > 1 && h("b", {}, `${run.name} `), where, " ", h("code", {}, check), h("div", {}, message),
      remedy && h("div", { class: "note" }, `→ ${remedy}`)));
}

/** Of several runs the keys that differ; of each run its whole config. */
function configView() {
  const known = store.runs.filter((run) => Object.keys(run.config).length);
  return h("section", {}, known.length > 1 && [h("h2", {}, "Differences of the configs"), differences(known)],
    known.map((run) => h("details", { class: "config" }, h("summary", {}, `config of ${run.name}`),
      h("table", {}, Object.entries(run.config).map(([key, value]) => h("tr", {}, h("th", {}, key), h("td", {}, shown(value))))))));
}

const shown = (value) => (value === undefined ? "–" : value.replace(/^"(.*)"$/, "$1"));

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const differ = keys.filter((key) => new Set(runs.map((run) => run.config[key])).size > 1);
  if (!differ.length) return h("p", { class: "note" }, "The configs are equal.");
  return h("div", { class: "wide" }, h("table", { class: "differences" },
    h("tr", {}, h("th", {}, "key"), runs.map((run) => h("th", {}, swatch(run.index), " ", run.name))),
    differ.map((key) => h("tr", {}, h("th", {}, key), runs.map((run) => h("td", {}, shown(run.config[key])))))));
}
