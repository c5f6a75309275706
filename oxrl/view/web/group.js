// The group: the answers to one prompt side by side; what most of them begin with is grey.

const GROUP_TEXT = 4000; // characters of an answer that are shown here

function sharedLength(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}

/** Of each text, how many characters it has in common with at least half of the others, from its beginning. */
function commonBeginnings(texts) {
  return texts.map((text, at) => {
    const shared = texts.filter((_, other) => other !== at).map((other) => sharedLength(text, other));
    return shared.sort((a, b) => b - a)[Math.ceil(shared.length / 2) - 1] ?? 0;
  });
}

/** The answers to one prompt in a step, and what all of them were asked. */
async function loadGroup(run, route) {
  const content = await run.loadStep(route.step);
  const answers = content.answers.filter((answer) => String(answer.group) === route.group);
  if (!answers.length) throw new Error(`step ${route.step} has no recorded group ${route.group}`);
  return { content, answers };
}

async function groupView(route) {
  const run = store.runs[route.run];
  const { answers } = await loadGroup(run, route);
  const list = h("div", { class: "cards" });
  const filters = filterBar(() => draw(), answers.every(isRow));
  const lengths = commonBeginnings(answers.map((answer) => answerText(answer).slice(0, GROUP_TEXT)));
  const grey = new Map(answers.map((answer, at) => [answer, lengths[at]]));

  function draw() {
    const shownAnswers = answers.filter(matcher(currentFilter())).sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index);
    replace(list, shownAnswers.map((answer) => answerCard(run, route, answer, grey.get(answer))));
    filters.count(shownAnswers.length, answers.length);
  }

  const { sample_id: sample, reference_answer: reference } = answers[0];
  const first = withMedia(answers[0], resolvedMedia(answers[0], answers));
  const rows = answers.every(isRow);
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", {}, `Group ${route.group}`), chip(plural(answers.length, rows ? "row" : "answer")),
      h("a", { class: "button", href: href({ run: run.index, prompt: sample }) }, "this prompt over the steps")),
    promptView(first, reference), h("div", { class: "controls" }, filters.element),
    lengths.some(Boolean) && h("p", { class: "legend" }, "grey: the beginning that an answer shares with at least half of the others"), list);
  return { element, ready: draw };
}

/** What was asked and, if the data has it, the answer. */
function promptView(answer, reference) {
  return h("section", { class: "prompt-box" }, promptOf(answer).map((message) => messageView(message, message.role !== "system")),
    mediaView(answer.media),
    reference !== null && reference !== undefined && h("div", { class: "reference" }, h("b", {}, "reference answer "),
      longText(typeof reference === "string" ? reference : JSON.stringify(reference))));
}

function answerCard(run, route, answer, grey) {
  const text = answerText(answer);
  const address = href({ run: run.index, step: route.step, group: route.group, answer: answer.index }, filterQuery());
  return h("article", { class: "card" },
    h("header", {}, h("a", { href: address, "data-item": true }, nameOf(answer)), rewardChip(answer), partChips(answer), statusChips(answer),
      h("span", { class: "note" }, plural(lengthOf(answer), "token"))),
    answer.error && h("p", { class: "error" }, answer.error),
    h("div", { class: "text" }, h("span", { class: "common" }, text.slice(0, grey)), text.slice(grey, GROUP_TEXT),
      text.length > GROUP_TEXT && h("a", { href: address }, ` … all ${short(text.length)} characters`)));
}

/** The parts of a reward. */
function partChips(answer) {
  return Object.entries(answer.parts ?? {}).map(([name, value]) => chip([`${name} `, h("b", {}, short(value))], "part"));
}
