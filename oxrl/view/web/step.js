// The step: its groups as rows of dots by reward, or all of its answers as a list.

const DOT = 4.2; // radius
const GUTTER = 26; // for answers without a reward
const SORTS = {
  order: { label: "order", by: (group) => group.position },
  spread: { label: "spread", by: (group) => -(group.std ?? -1) },
  reward: { label: "reward", by: (group) => -(group.mean ?? -Infinity) },
  length: { label: "length", by: (group) => -(mean(group.answers.map(lengthOf)) ?? -1) },
  truncated: { label: "truncation", by: (group) => -group.answers.filter(KINDS.truncated.test).length },
};

const lengthOf = (answer) => answer.tokens?.trained ?? answer.tokens?.length ?? 0;

/** The groups of a step: those of its header, with the answers that were recorded of them. */
function groupsOf({ header, answers }) {
  const groups = new Map();
  const group = (key) => {
    if (!groups.has(key)) groups.set(key, { key, position: groups.size, answers: [], rewards: [], recorded: true });
    return groups.get(key);
  };
  for (const each of header.groups ?? []) {
    const rewards = (each.rewards ?? []).filter((reward) => reward !== undefined);
    Object.assign(group(String(each.group)), { sample: each.sample_id, rewards, leftOut: each.left_out, recorded: each.recorded });
  }
  for (const answer of answers) {
    const own = group(String(answer.group));
    own.answers.push(answer);
    own.sample ??= answer.sample_id;
    own.leftOut ??= null;
  }
  for (const each of groups.values()) {
    const graded = (each.rewards.length ? each.rewards : each.answers.map(valueOf)).filter(isNumber);
    Object.assign(each, { mean: mean(graded), std: deviation(graded) });
  }
  return [...groups.values()].filter((each) => each.answers.length || each.rewards.length);
}

/** What an answer's dot looks like: its shape says what happened, its position the reward. */
function dotKind(answer) {
  if (isRow(answer)) return /^(chosen|rejected)$/.test(nameOf(answer)) ? nameOf(answer) : "graded";
  if (isUngraded(answer)) return "ungraded";
  if (KINDS.truncated.test(answer)) return "truncated";
  if (hasToolError(answer)) return "tool";
  return answer.left_out ? "left-out" : "graded";
}

const DOT_SHAPES = { graded: 0, "left-out": 0, truncated: 2, tool: 3, ungraded: 4, chosen: 0, rejected: 1 };
const DOT_WORDS = {
  graded: "trained on", "left-out": "left out", truncated: "truncated", tool: "tool error", ungraded: "not graded",
  chosen: "chosen", rejected: "rejected",
};

/** Dots of answers along the axis of rewards; equal rewards stand in small columns. */
function dotStrip(items, range, width, addressOf) {
  const x = scale(...range, GUTTER + DOT + 2, width - DOT - 6);
  const stacks = new Map();
  for (const item of items) {
    const at = isNumber(valueOf(item.answer)) ? Math.round(x(valueOf(item.answer)) / (2 * DOT)) : -1;
    if (!stacks.has(at)) stacks.set(at, []);
    stacks.get(at).push(item);
  }
  const tallest = Math.max(1, ...[...stacks.values()].map((stack) => Math.min(4, stack.length)));
  const height = tallest * (2 * DOT + 1.5) + 10;
  const dots = [...stacks].flatMap(([at, stack]) => stack.map((item, order) => {
    const column = Math.floor(order / 4) * (2 * DOT + 1.5);
    const graded = at >= 0;
    const right = graded && x(valueOf(item.answer)) + Math.ceil(stack.length / 4) * 2 * DOT > width;
    const cx = graded ? x(valueOf(item.answer)) + (right ? -column : column) : DOT + 3 + column;
    const cy = height - 6 - DOT - (order % 4) * (2 * DOT + 1.5);
    return dot(item, cx, cy, addressOf);
  }));
  const zero = range[0] < 0 && range[1] > 0 ? s("path", { class: "grid", d: `M${x(0)},0V${height}` }) : null;
  return s("svg", { class: "dots", width, height, viewBox: `0 0 ${width} ${height}` },
    zero, s("path", { class: "axis", d: `M${GUTTER},${height - 3}H${width}` }), dots);
}

function dot({ answer, faint }, x, y, addressOf) {
  const kind = dotKind(answer);
  const value = isRow(answer) ? "mean log-prob" : "reward";
  const label = `${nameOf(answer)}: ${value} ${short(valueOf(answer))}, ${DOT_WORDS[kind]}${answer.kind ? "" : ", not recorded"}`;
  const shape = s("path", {
    class: `dot ${kind} ${faint ? "faint" : ""} ${answer.kind ? "" : "unrecorded"}`, d: markPath(DOT_SHAPES[kind], x, y, DOT - 0.6),
  }, s("title", {}, label));
  return answer.kind ? s("a", { href: addressOf(answer), "aria-label": label }, shape) : shape;
}

/** The dots of a group: recorded answers, else the rewards that are known of it. */
function dotItems(group, matches) {
  if (group.answers.length) return group.answers.map((answer) => ({ answer, faint: !matches(answer) }));
  return group.rewards.map((reward, index) => ({ answer: { index, reward }, faint: false }));
}

async function stepView(route) {
  const run = store.runs[route.run];
  const content = await run.loadStep(route.step);
  const groups = groupsOf(content);
  const metrics = { ...run.metricsOf(route.step), ...content.header.metrics };
  const rewards = groups.flatMap((group) => [...group.rewards, ...group.answers.map(valueOf)]);
  const rows = content.header.online === false || (content.answers.length > 0 && content.answers.every(isRow));
  const range = extent(rewards) ?? [0, 1];
  const list = h("div", { class: "list" });
  const filters = filterBar(() => draw(), rows);
  const controls = listControls(() => draw(), rows);

  function draw() {
    const filter = currentFilter();
    const matches = matcher(filter);
    const asList = currentRoute().query.get("list") === "answers";
    const sort = SORTS[currentRoute().query.get("sort")] ?? SORTS.order;
    const ordered = [...groups].sort((a, b) => sort.by(a) - sort.by(b) || a.position - b.position);
    const kept = ordered.filter((group) => !isActive(filter) || group.answers.some(matches));
    const width = Math.max(200, Math.min(760, list.clientWidth - (innerWidth < 700 ? 24 : 420)));
    replace(list, asList ? answerList(run, route, kept, matches)
      : [rewardAxis(range, width), kept.map((group) => groupRow(run, route, group, { range, width, matches }))]);
    filters.count(sum(groups.map((group) => group.answers.filter(matches).length)), content.answers.length);
  }

  const element = h("div", {},
    stepHead(run, route, content.header, groups),
    findingsOfStep(run, route.step),
    h("div", { class: "facts" }, secondsBar(content.header.seconds, metrics), factChips(metrics)),
    h("div", { class: "controls" }, filters.element, controls), legend(groups, rows), list);
  return { element, ready: draw, resized: draw };
}

function stepHead(run, route, header, groups) {
  const at = run.steps.indexOf(route.step);
  const move = (step, text, key) => step === undefined ? h("span", { class: "button off" }, text)
    : h("a", { class: "button", href: href({ run: run.index, step }, filterQuery()), "data-key": key }, text);
  const all = Math.max(groups.length, header.groups?.length ?? 0);
  const recorded = groups.filter((group) => group.answers.length).length;
  return h("div", { class: "head" }, h("h1", {}, `Step ${route.step}`), move(run.steps[at - 1], "◀", "["), move(run.steps[at + 1], "▶", "]"),
    chip(plural(all, "group")), recorded < all && chip(`${recorded} recorded in full`),
    isNumber(header.version) && chip(`weights ${header.version}`), header.algorithm && chip(header.algorithm),
    header.partial && chip("from rollouts.jsonl", "warn", "the first answers of the step, without advantages"));
}

function findingsOfStep(run, step) {
  const found = run.findings().filter((finding) => finding.step === step);
  return found.length ? h("section", { class: "findings" }, found.map((finding) => findingView({ run, ...finding }))) : null;
}

/** Where the seconds of the step went. */
function secondsBar(recorded, metrics) {
  const logged = Object.entries(metrics).filter(([name]) => name.endsWith("_seconds")).map(([name, value]) => [name.replace(/_seconds$/, ""), value]);
  const all = Object.fromEntries([...logged, ...Object.entries(recorded ?? {})].filter(([, value]) => isNumber(value) && value > 0));
  if (all.step && !all.train) all.train = all.step - (all.check ?? 0); // a run on rows, whose checks are made in the step
  const parts = Object.entries(all).filter(([name, value]) => name !== "wait" && name !== "step" && value > 0);
  const total = sum(parts.map(([, value]) => value));
  if (!total) return null;
  const label = parts.map(([name, value]) => `${name} ${short(value)} s`).join(", ");
  return h("div", { class: "seconds", role: "img", "aria-label": `seconds: ${label}`, title: label }, parts.map(([name, value], at) =>
    h("span", { class: `part kind-${at % 6}`, style: { "flex-grow": String(value / total) } }, `${name} ${short(value)} s`)));
}

function factChips(metrics) {
  const wanted = ["reward", "reward_std", "loss", "grad_norm", "entropy", "length", "truncated", "ungraded", "kl", "logprob_gap", "lr"];
  return wanted.filter((name) => isNumber(metrics[name])).map((name) => chip([`${name} `, h("b", {}, short(metrics[name]))], "", meaningOf(name)));
}

function listControls(changed, rows) {
  const select = (name, options, label) => h("label", { class: "toggle" }, `${label} `, h("select", {
    name,
    onchange: (event) => {
      remember(name, event.target.value === Object.keys(options)[0] ? null : event.target.value);
      changed();
    },
  }, Object.entries(options).map(([value, text]) => h("option", { value, selected: currentRoute().query.get(name) === value }, text))));
  const sorts = Object.fromEntries(Object.entries(SORTS).map(([name, { label }]) => [name, label]));
  if (rows) {
    sorts.reward = "log-prob";
    delete sorts.truncated;
  }
  return h("span", { class: "pair" }, select("sort", sorts, "sort by"), select("list", { groups: "groups", answers: rows ? "rows" : "answers" }, "show"));
}

function legend(groups, rows) {
  const kinds = new Set(groups.flatMap((group) => group.answers.map(dotKind)));
  if (!kinds.size) return null;
  return h("p", { class: "legend" }, 
    rows ? "each mark is a row, by the mean log-prob of its trained tokens: " : "each mark is an answer, from the lowest to the highest reward: ",
    [...kinds].map((kind) => h("span", {},
    s("svg", { width: 14, height: 12, "aria-hidden": "true" }, s("path", { class: `dot ${kind}`, d: markPath(DOT_SHAPES[kind], 7, 6, 3.6) })), DOT_WORDS[kind])));
}

function rewardAxis(range, width) {
  const x = scale(...range, GUTTER + DOT + 2, width - DOT - 6);
  const labels = ticks(...range, Math.min(6, width / 80)).map((value) =>
    s("text", { class: "tick", x: x(value), y: 12, "text-anchor": "middle" }, short(value)));
  return h("div", { class: "group-row axis-row" }, h("span", { class: "note" }, "prompt"),
    s("svg", { width, height: 16, viewBox: `0 0 ${width} 16` }, labels), h("span", { class: "note" }, "mean ± std"));
}

function groupRow(run, route, group, { range, width, matches }) {
  const parts = { run: run.index, step: route.step, group: group.key };
  const addressOf = (answer) => href({ ...parts, answer: answer.index }, filterQuery());
  const line = group.answers.length ? promptLine(group.answers[0]) || group.sample : group.sample;
  const title = h(group.answers.length ? "a" : "span", { class: "prompt", "data-item": group.answers.length > 0, href: group.answers.length ? href(parts, filterQuery()) : null },
    (line || `group ${group.key}`).slice(0, 220));
  const truncated = group.answers.filter(KINDS.truncated.test).length;
  const notes = [
    group.answers.length && plural(Math.round(mean(group.answers.map(lengthOf))), "token"),
    truncated && `${truncated} truncated`, group.leftOut && `left out: ${group.leftOut}`, !group.answers.length && "rewards only",
  ].filter(Boolean);
  return h("div", { class: "group-row", "data-group": group.key }, title,
    dotStrip(dotItems(group, matches), range, width, addressOf),
    h("span", { class: "numbers" }, h("b", {}, short(group.mean)), group.std !== null && group.rewards.length + group.answers.length > 1 && ` ± ${short(group.std)}`, h("span", { class: "note" }, notes.join(" · "))));
}

function answerList(run, route, groups, matches) {
  const answers = groups.flatMap((group) => group.answers.filter(matches));
  return answers.map((answer) => h("a", {
    class: "answer-row", "data-item": true, href: href({ run: run.index, step: route.step, group: answer.group, answer: answer.index }, filterQuery()),
  }, rewardChip(answer), h("span", { class: "note" }, isRow(answer) ? `${answer.group} ${nameOf(answer)}` : `${answer.group}/${answer.index}`), statusChips(answer),
    h("span", { class: "snippet" }, answerText(answer).slice(0, 300).replace(/\s+/g, " "))));
}

function rewardChip(answer) {
  if (isRow(answer)) return isNumber(valueOf(answer)) ? chip(`log-prob ${short(valueOf(answer))}`, "", "mean over its trained tokens") : null;
  return isNumber(answer.reward) ? chip(`reward ${short(answer.reward)}`, "reward") : chip("✕ not graded", "bad", answer.error);
}

function statusChips(answer) {
  return [KINDS.truncated.test(answer) && chip("▲ truncated", "warn"), hasToolError(answer) && chip("◆ tool error", "warn"),
    answer.left_out && chip(`○ ${answer.left_out}`), answer.greedy && chip("greedy")].filter(Boolean);
}
