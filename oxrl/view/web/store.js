// What the page knows of the runs. It comes from the server, of growing files only the new bytes; in an exported page it
// is inside of the page, compressed.

const POLL = 1500; // milliseconds between two looks at the files
const embedded = JSON.parse(byId("data").textContent || "null");
const base = location.pathname.replace(/\/?$/, "/");
const overview = { runs: [], metrics: [] };
const responses = new Map(); // of finished requests, by path
let connected = true;

/** As the server's paths have it: no character but letters, digits and -_.~ is left as it is. */
function encoded(text) {
  const code = (sign) => `%${sign.charCodeAt(0).toString(16).toUpperCase()}`;
  return encodeURIComponent(String(text)).replace(/[!'()*]/g, code);
}

/** {text, header(name)} of a path; an Error with the server's reason if there is nothing. */
async function load(path, query = "") {
  if (embedded) return loadEmbedded(path);
  const response = await fetch(base + path + query, { cache: "no-store" });
  const text = await response.text();
  if (!response.ok) throw new Error(text.trim() || `the server answered ${response.status}`);
  return { text, header: (name) => response.headers.get(name) };
}

async function loadEmbedded(path) {
  const entry = embedded[path];
  if (!entry) throw new Error("this was not exported: open the run with oxrl view");
  const bytes = Uint8Array.from(atob(entry.gzip), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return { text: await new Response(stream).text(), header: (name) => entry.headers[name] ?? null };
}

async function loadJSON(path) {
  return parseJSON((await load(path)).text);
}

/** A response is kept for a moment, so that going back and forth does not read it again. */
async function loadKept(path) {
  if (!responses.has(path)) {
    const pending = loadJSON(path);
    pending.catch(() => responses.delete(path));
    responses.set(path, pending);
    if (responses.size > 60) responses.delete(responses.keys().next().value);
  }
  return responses.get(path);
}

/** Ask again for what a longer run answers in another way. */
function forget(beginning) {
  for (const path of responses.keys()) if (path.startsWith(beginning)) responses.delete(path);
}

/** JSON as Python writes it: NaN and Infinity are null here. */
function parseJSON(text) {
  try {
    return JSON.parse(text);
  } catch {
    const number = /("(?:[^"\\]|\\.)*")|-?\b(?:NaN|Infinity)\b/g;
    return JSON.parse(text.replace(number, (found, string) => string ?? "null"));
  }
}

function parsedLine(line) {
  try {
    const row = parseJSON(line);
    return row && typeof row === "object" ? [row] : [];
  } catch {
    return []; // a damaged line
  }
}

/** A file that grows by lines. */
class GrowingFile {
  constructor(path) {
    Object.assign(this, { path, end: 0, file: "", rows: [] });
  }

  /** Read what is new; whether there was anything. */
  async pull() {
    let changed = false;
    for (let more = true; more; ) {
      const answer = await load(this.path, `?from=${this.end}&file=${this.file}`);
      const file = answer.header("X-File") ?? "";
      const restarted = file !== this.file || Number(answer.header("X-Start")) < this.end;
      if (restarted && this.rows.length) this.rows = [];
      const rows = answer.text.split("\n").filter(Boolean).flatMap(parsedLine);
      for (const row of rows) this.rows.push(row);
      changed ||= rows.length > 0 || (restarted && file !== this.file);
      this.file = file;
      this.end = Number(answer.header("X-End"));
      more = !embedded && answer.header("X-More") === "1";
    }
    return changed;
  }
}

/** One run: its curves, findings, config and the steps that can be opened. */
class Run {
  constructor(index, { name, folder }) {
    Object.assign(this, { index, name, folder, shown: true, config: {}, warnings: [], steps: [], grown: 0 });
    this.metrics = new GrowingFile(`run/${index}/lines/metrics`);
    this.checks = new GrowingFile(`run/${index}/lines/checks`);
  }

  path(rest) {
    return `run/${this.index}/${rest}`;
  }

  async pull() {
    const metrics = await this.metrics.pull();
    const checks = await this.checks.pull();
    const steps = await loadJSON(this.path("steps"));
    const other = steps.length !== this.steps.length || steps.at(-1) !== this.steps.at(-1);
    this.steps = steps;
    if (metrics) {
      this.grown = Date.now();
      this.config = await loadJSON(this.path("config"));
      if (!this.checks.rows.length) this.warnings = await loadJSON(this.path("warnings")); // reads the whole file
    }
    if (metrics || other) forget(this.path("prompt"));
    return metrics || checks || other;
  }

  get lastStep() {
    return this.metrics.rows.at(-1)?.step ?? this.steps.at(-1) ?? null;
  }

  get algorithm() {
    return parseJSON(this.config["train.alg_name"] ?? "null");
  }

  /** Names of all metrics, in the order in which they first appear. */
  metricNames() {
    const names = new Set();
    for (const row of this.metrics.rows) for (const name in row) if (name !== "step") names.add(name);
    return names;
  }

  curve(metric) {
    return this.metrics.rows.filter((row) => metric in row).map((row) => [row.step, row[metric]]);
  }

  metricsOf(step) {
    return Object.assign({}, ...this.metrics.rows.filter((row) => row.step === step));
  }

  /** What the guard found, the worst first within a step. */
  findings() {
    const guard = this.checks.rows.filter((row) => row.state === "failed" || row.state === "warned");
    const found = this.checks.rows.length ? guard : this.warnings; // of a run without the guard, what its curves show
    return [...found].sort((a, b) => a.step - b.step || (a.state > b.state ? 1 : -1));
  }

  /** The recorded step nearest to a step; null if nothing is recorded. */
  nearestStep(step) {
    return this.steps.reduce(
      (best, each) => (best === null || Math.abs(each - step) < Math.abs(best - step) ? each : best), null);
  }

  loadStep(step) {
    return loadKept(this.path(`step/${step}`));
  }

  loadAnswer(step, group, index) {
    return loadKept(this.path(`answer/${step}/${encoded(group)}/${encoded(index)}`));
  }

  loadPrompt(sample) {
    return loadKept(this.path(`prompt/${encoded(sample)}`));
  }
}

const store = { runs: [] };

async function openStore() {
  Object.assign(overview, await loadJSON("overview"));
  store.runs = overview.runs.map((run, index) => new Run(index, run));
  for (const run of store.runs) await run.pull();
}

/** Look at the files again and again while the page is visible; `changed` is called when there is something new. */
function follow(changed) {
  if (embedded) return;
  const look = async () => {
    if (!document.hidden) {
      const before = connected;
      try {
        const news = [];
        for (const run of store.runs) news.push(await run.pull());
        connected = true;
        if (news.includes(true) || !before) changed();
      } catch {
        connected = false;
        if (before) changed();
      }
    }
    setTimeout(look, POLL);
  };
  setTimeout(look, POLL);
}
