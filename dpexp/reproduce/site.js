"use strict";
// Filters by paper, scale and title; kept in the address, so that a view can be shared. Without scripts all is shown.
const paper = document.getElementById("paper");
const scale = document.getElementById("scale");
const find = document.getElementById("find");
const articles = [...document.querySelectorAll("article")];

function apply() {
  const word = find.value.trim().toLowerCase();
  let shown = 0;
  for (const article of articles) {
    const fits =
      (!paper.value || article.dataset.paper === paper.value) &&
      (!scale.value || article.dataset.scale.split(" ").includes(scale.value)) &&
      (!word || article.querySelector("h2").textContent.toLowerCase().includes(word));
    article.hidden = !fits;
    shown += fits;
    for (const section of article.querySelectorAll("section"))
      section.hidden = Boolean(scale.value) && section.dataset.scale !== scale.value;
    const link = document.querySelector(`nav a[href="#${article.id}"]`);
    if (link) link.parentElement.hidden = !fits;
  }
  for (const group of document.querySelectorAll("nav .paper")) group.hidden = !group.querySelector("li:not([hidden])");
  document.getElementById("count").textContent = `${shown} of ${articles.length} shown`;
  const chosen = new URLSearchParams();
  for (const field of [paper, scale, find]) if (field.value) chosen.set(field.id, field.value);
  const query = chosen.toString();
  history.replaceState(null, "", (query ? `?${query}` : location.pathname) + location.hash);
}

const asked = new URLSearchParams(location.search);
for (const field of [paper, scale, find]) if (asked.has(field.id)) field.value = asked.get(field.id);
for (const field of [paper, scale]) field.addEventListener("change", apply);
find.addEventListener("input", apply);
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
if (matchMedia("(max-width: 52rem)").matches) document.querySelector("nav details").open = false;
apply();
