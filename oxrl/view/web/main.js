// The frame: one view at a time, chosen by the address.

const VIEWS = { run: runView, step: stepView, group: groupView, answer: answerView, prompt: promptOverSteps };
let current = null;
let shownNumber = 0;

/** Show the view of the address; a slower one that was asked for earlier is dropped. */
async function show() {
  const number = (shownNumber += 1);
  const route = currentRoute();
  let view;
  try {
    if (!(store.runs[route.run] instanceof Run)) throw new Error(`there is no run ${route.run}`);
    if (typeof route.step === "string") throw new Error(`there is no step ${route.step}: a step is a number`);
    view = await VIEWS[route.view](route);
  } catch (error) {
    view = { element: h("div", { class: "error", role: "alert" }, error.message) };
  }
  if (number !== shownNumber) return;
  hideCard();
  current = view;
  showBar(route);
  replace(byId("view"), view.element);
  dropCharts();
  scrollTo(0, 0);
  view.ready?.();
  byId("view").dataset.shown = route.view;
}

function showBar(route) {
  const run = store.runs[route.run];
  const crumbs = [["runs", href({}), true]];
  if (route.view !== "run" && run) crumbs.push([run.name, href({}), false]);
  const add = (word, parts) => crumbs.push([word, href({ run: route.run, ...parts }, filterQuery()), true]);
  if (route.step !== undefined) add(`step ${route.step}`, { step: route.step });
  if (route.group !== undefined) add(`group ${route.group}`, { step: route.step, group: route.group });
  if (route.answer !== undefined) add(`answer ${route.answer}`, { step: route.step, group: route.group, answer: route.answer });
  if (route.prompt !== undefined) add("prompt", { prompt: route.prompt });
  document.title = `${crumbs.slice(1).map(([word]) => word).join(" › ") || store.runs.map(({ name }) => name).join(", ")} · oxRL`;
  replace(byId("bar"), h("a", { class: "brand", href: href({}) }, "oxRL"),
    h("nav", { "aria-label": "where" }, crumbs.map(([word, address, link], at) => [at > 0 && h("span", { class: "note" }, " › "), link ? h("a", { href: address }, word) : h("span", {}, word)])),
    h("span", { class: "spring" }), stateChip(),
    h("button", { onclick: switchTheme, title: "dark or light (d)", "aria-label": "dark or light" }, "◐"),
    h("button", { onclick: showHelp, title: "keys (?)", "aria-label": "keys" }, "?"));
}

function stateChip() {
  if (embedded) return chip("exported", "", "the data is inside of this file");
  if (!connected) return chip("✕ no server", "bad", "oxrl view has ended; what was read stays");
  return store.runs.some(isLive) ? chip("● live", "good", "new steps appear by themselves") : null;
}

/** Dark, light; at first what the system prefers. */
function switchTheme() {
  const root = document.documentElement;
  const dark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = dark ? "light" : "dark";
}

function notify(text) {
  document.querySelector(".toast")?.remove();
  const toast = h("div", { class: "toast", role: "status" }, text);
  document.body.append(toast);
  setTimeout(() => toast.remove(), 5000);
}

function newData() {
  for (const run of store.runs) run.seenGrowing ||= Date.now() - run.grown < POLL;
  current?.refresh?.();
  showBar(currentRoute());
}

async function start() {
  try {
    await openStore();
  } catch (error) {
    return void replace(byId("view"), h("div", { class: "error", role: "alert" }, error.message));
  }
  addEventListener("hashchange", show);
  addEventListener("resize", debounced(() => current?.resized?.(), 200));
  addEventListener("scroll", () => current && !document.querySelector(".token.selected") && hideCard(), { passive: true });
  addEventListener("keydown", (event) => onKey(event, current));
  await show();
  follow(newData);
}

start();
