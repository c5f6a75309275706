// The answer: its conversation, and its tokens coloured by one of their numbers.

async function answerView(route) {
  const run = store.runs[route.run];
  const { answers } = await loadGroup(run, route);
  const answer = await run.loadAnswer(route.step, route.group, route.answer);
  const matching = answers.filter(matcher(currentFilter()));
  const at = matching.findIndex((each) => String(each.index) === route.answer);
  const address = (each) => each && href({ run: run.index, step: route.step, group: route.group, answer: each.index }, { ...filterQuery(), colour: currentRoute().query.get("colour") });
  const tokens = tokenPanel(answer.tokens, route);
  const shown = withMedia(answer, resolvedMedia(answer, answers));
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", {}, sentence(nameOf(answer))),
      at > 0 && h("a", { class: "button", href: address(matching[at - 1]) }, "◀"),
      at < matching.length - 1 && h("a", { class: "button", href: address(matching[at + 1]) }, "▶"),
      rewardChip(answer), partChips(answer), statusChips(answer),
      (answer.versions ?? []).length > 1 && chip(`weights ${answer.versions.join(", ")}`),
      isNumber(answer.turns) && answer.turns > 1 && chip(plural(answer.turns, "turn"))),
    answer.error && h("p", { class: "error" }, answer.error),
    promptView(shown, answer.reference_answer), replyView(shown), tokens.element);
  return {
    element, ready: tokens.ready, keys: { ...tokens.keys, j: () => go(address(matching[at + 1]) ?? location.hash), k: () => go(address(matching[at - 1]) ?? location.hash) },
  };
}

/** The turns of an answer; all but the last message of the policy are folded. */
function replyView(answer) {
  const reply = answer.messages ? replyOf(answer) : [{ role: "trained", content: answer.text ?? "" }];
  const last = reply.findLastIndex((message) => ["assistant", "trained"].includes(message.role));
  return h("section", { class: "reply" }, reply.map((message, at) => messageView(message, at === last)));
}

/** The switch, the legend and the tokens. */
function tokenPanel(tokens, route) {
  const none = (text) => ({ element: h("section", {}, h("h2", {}, "Tokens"), h("p", { class: "note" }, text)), ready: () => {}, keys: {} });
  if (!tokens?.ids?.length) return none("The tokens of this answer are not recorded.");
  const names = colourNames(tokens);
  const view = new TokenView(tokens, (at) => remember("t", at));
  const samples = h("span", { class: "samples" });
  const choose = h("span", { class: "switch", role: "radiogroup", "aria-label": "colour tokens by" });
  let colour = names.includes(route.query.get("colour")) ? route.query.get("colour") : names[0];

  function recolour(name) {
    colour = name;
    remember("colour", name);
    paint();
  }

  function paint() {
    view.recolour(colour);
    replace(choose, names.map((name) => h("button", {
      role: "radio", "aria-checked": String(name === colour), title: COLOURS[name].help, "data-colour": name, onclick: () => recolour(name),
    }, COLOURS[name].label)));
    replace(samples, (view.colouring?.samples ?? []).map(([style, text]) => h("span", { class: `token ${style}` }, text || " · ")),
      colour && h("span", { class: "note" }, ` ${COLOURS[colour].help}`));
  }

  const numbers = h("input", { type: "checkbox", onchange: (event) => view.numbers(event.target.checked) });
  const jump = h("input", {
    type: "number", class: "narrow", min: 0, max: tokens.ids.length - 1, placeholder: "token", "aria-label": "go to token",
    onchange: (event) => event.target.value !== "" && view.select(Math.min(tokens.ids.length - 1, Math.max(0, Number(event.target.value)))),
  });
  const trained = tokens.mask ? `, ${short(tokens.mask.filter(Boolean).length)} trained` : "";
  const element = h("section", { class: "token-panel" }, h("h2", {}, "Tokens ", h("span", { class: "note" }, short(tokens.ids.length) + trained)),
    !tokens.pieces && h("p", { class: "note" }, "rollouts.jsonl has no texts of tokens: these are ids"),
    h("div", { class: "controls sticky" }, choose, h("label", { class: "toggle" }, numbers, "numbers"), jump, samples), view.element);
  const next = () => names.length && recolour(names[(names.indexOf(colour) + 1) % names.length]);
  return {
    element, keys: { c: next, n: () => numbers.click() },
    ready: () => {
      paint();
      const asked = route.query.get("t");
      if (asked !== null && Number(asked) < tokens.ids.length) view.select(Number(asked));
    },
  };
}
