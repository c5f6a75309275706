// One prompt over the steps: what learning looks like.

const PROMPT_TEXT = 500; // characters of an answer that are shown here

async function promptOverSteps(route) {
  const run = store.runs[route.run];
  const steps = await run.loadPrompt(route.prompt);
  if (!steps.length) throw new Error(`no recorded step has the prompt ${route.prompt}`);
  const range = extent(steps.flatMap(({ answers }) => answers.map(valueOf))) ?? [0, 1];
  const list = h("div", { class: "list" });
  const rows = steps.every(({ answers }) => answers.every(isRow));
  const [title, label] = rows ? ["mean log-prob of this row", "mean log-prob"] : ["mean reward of this prompt", "mean reward"];
  const filters = filterBar(() => draw(), rows);
  const chart = new Chart({ title, onPick: (_, step) => openStep(run, step) });
  const first = steps[0].answers[0];

  function draw() {
    const matches = matcher(currentFilter());
    const kept = steps.filter(({ answers }) => answers.some(matches));
    const width = Math.max(180, Math.min(360, list.clientWidth - 24));
    replace(list, kept.map((entry) => stepOfPrompt(run, entry, { range, width, matches })));
    filters.count(sum(steps.map(({ answers }) => answers.filter(matches).length)), sum(steps.map(({ answers }) => answers.length)));
  }

  const means = steps.map(({ step, answers }) => [step, mean(answers.map(valueOf).filter(isNumber))]);
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", {}, "One prompt over the steps"), chip(route.prompt), chip(plural(steps.length, "step"))),
    promptView(withMedia(first, resolvedMedia(first, steps[0].answers)), first.reference_answer), h("div", { class: "panels one" }, chart.element),
    h("div", { class: "controls" }, filters.element), list);
  return {
    element, resized: draw,
    ready: () => {
      draw();
      chart.update([{ run: run.index, label, points: means }]);
    },
  };
}

function stepOfPrompt(run, { step, answers }, { range, width, matches }) {
  const matching = answers.filter(matches);
  const graded = matching.filter((answer) => isNumber(valueOf(answer))).sort((a, b) => valueOf(b) - valueOf(a));
  const group = String(answers[0].group);
  const addressOf = (answer) => href({ run: run.index, step, group: answer.group, answer: answer.index }, filterQuery());
  const ends = graded.length > 1 ? [["best", graded[0]], ["worst", graded.at(-1)]] : [[nameOf(matching[0]), graded[0] ?? matching[0]]];
  return h("article", { class: "prompt-step" },
    h("header", {}, h("a", { "data-item": true, href: href({ run: run.index, step, group }, filterQuery()) }, `step ${step}`),
      chip(`mean ${short(mean(answers.map(valueOf).filter(isNumber)))}`, "reward"),
      dotStrip(answers.map((answer) => ({ answer, faint: !matches(answer) })), range, width, addressOf)),
    h("div", { class: "ends" }, ends.map(([word, answer]) => h("div", {}, h("a", { class: "note", href: addressOf(answer) }, `${word}: ${short(valueOf(answer))}`),
      h("div", { class: "text" }, answerText(answer).slice(0, PROMPT_TEXT))))));
}
