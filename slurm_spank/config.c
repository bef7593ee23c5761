/* PURE reading of the arguments that plugstack.conf gives the plugin: everstep=PATH auto_resume=0|1 … */
#include "everstep.h"

#include <stdio.h>
#include <string.h>

static const char *value_of(const char *argument, const char *name)
{
	size_t length = strlen(name);

	return strncmp(argument, name, length) == 0 && argument[length] == '=' ? argument + length + 1 : NULL;
}

static int read_one(struct config *c, const char *argument, char *why)
{
	const char *value = NULL;

	if ((value = value_of(argument, "everstep"))) {
		c->everstep = value;
		if (*value == '/')
			return 0;
		snprintf(why, WHY_SIZE, "a full path is wanted, not '%.64s'", value);
		return -1;
	}
	if ((value = value_of(argument, "auto_resume")))
		return parse_switch(value, &c->defaults.auto_resume, why);
	if ((value = value_of(argument, "standby")))
		return parse_count(value, &c->defaults.standby, why);
	if ((value = value_of(argument, "spare_nodes")))
		return parse_count(value, &c->defaults.spare_nodes, why);
	if ((value = value_of(argument, "resume_policy"))) {
		c->defaults.resume_policy = value;
		return parse_policy(value, why);
	}
	if ((value = value_of(argument, "users"))) {
		c->users = value;
		return 0;
	}
	if ((value = value_of(argument, "groups"))) {
		c->groups = value;
		return 0;
	}
	snprintf(why, WHY_SIZE, "not an argument of this plugin");
	return -1;
}

void config_read(struct config *c, int ac, char **av)
{
	*c = (struct config){
		.everstep = EVERSTEP_PATH,
		.defaults = { .auto_resume = UNSET, .standby = UNSET, .spare_nodes = UNSET },
	};
	for (int i = 0; i < ac; i++) {
		char why[WHY_SIZE] = "";

		if (read_one(c, av[i], why) < 0 && !c->problem[0])
			snprintf(c->problem, sizeof(c->problem), "%.64s: %.180s", av[i], why);
	}
}

bool config_lists(const char *list, const char *name)
{
	size_t length = strlen(name);

	for (const char *at = list; at && length; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
		if (strncmp(at, name, length) == 0 && (at[length] == ',' || !at[length]))
			return true;
	return false;
}
