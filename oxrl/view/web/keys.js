// Keys. A view may give some of them a meaning of its own.

const HELP = [
  ["j, k", "next and previous item; in an answer, next and previous answer"],
  ["Enter", "open the item"],
  ["u", "up: from the answer to its group, its step, its run"],
  ["[, ]", "previous and next recorded step"],
  ["/", "filter by text"],
  ["c", "colour tokens by the next number"],
  ["n", "show the numbers of tokens"],
  ["← →", "in a chart the step, in tokens the token before and after"],
  ["Esc", "close what is open"],
  ["d", "dark or light"],
  ["?", "this list"],
];

function showHelp() {
  const dialog = byId("help");
  replace(dialog, h("h2", {}, "Keys"), h("table", {}, HELP.map(([key, text]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, text)))),
    h("form", { method: "dialog" }, h("button", {}, "close")));
  dialog.showModal();
}

function moveFocus(by) {
  const items = [...byId("view").querySelectorAll("[data-item]")];
  if (!items.length) return;
  const at = items.indexOf(document.activeElement);
  const next = items[at < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, at + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

const KEYS = {
  j: () => moveFocus(1),
  k: () => moveFocus(-1),
  u: () => goUp(),
  "[": () => byId("view").querySelector('[data-key="["]')?.click(),
  "]": () => byId("view").querySelector('[data-key="]"]')?.click(),
  "/": () => byId("view").querySelector("[data-filter]")?.focus(),
  "?": () => showHelp(),
  d: () => switchTheme(),
};

function goUp() {
  const { view, run, step, group } = currentRoute();
  const up = { answer: { run, step, group }, group: { run, step }, step: { run: null }, prompt: { run: null } }[view];
  if (up) go(href(up, view === "answer" || view === "group" ? filterQuery() : {}));
}

function onKey(event, view) {
  const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const action = view?.keys?.[event.key] ?? KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
