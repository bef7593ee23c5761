/* The plugin's pure parts, and its ear over a real socket; run by `make check`, under valgrind where it is there. */
#include "everstep.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

#define CHECK(condition)                                                                   \
	do {                                                                               \
		if (!(condition)) {                                                        \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			failures++;                                                        \
		}                                                                          \
	} while (0)

static void a_switch_is_0_or_1_or_stands_alone(void)
{
	char why[WHY_SIZE] = "";
	int value = UNSET;

	CHECK(parse_switch(NULL, &value, why) == 0 && value == 1);
	CHECK(parse_switch("0", &value, why) == 0 && value == 0);
	CHECK(parse_switch("", &value, why) == 0 && value == 1);
	CHECK(parse_switch("0", &value, why) == 0 && parse_switch("(null)", &value, why) == 0 && value == 1);
	CHECK(parse_switch("yes", &value, why) == -1 && strstr(why, "'yes'"));
	CHECK(parse_switch("10", &value, why) == -1);
}

static void a_count_is_a_whole_number(void)
{
	static const char *const wrong[] = { "", "-1", "+1", " 1", "1x", "1.5", "99999999999999999999", "x", NULL };
	char why[WHY_SIZE] = "";
	int value = UNSET;

	CHECK(parse_count("0", &value, why) == 0 && value == 0);
	CHECK(parse_count("12", &value, why) == 0 && value == 12);
	for (int i = 0; wrong[i]; i++)
		CHECK(parse_count(wrong[i], &value, why) == -1 && value == 12);
	CHECK(parse_count(NULL, &value, why) == -1);
}

static void a_policy_is_some_of_the_rungs(void)
{
	static const char *const right[] = { "all", "none", "standby", "requeue,spare", "standby,spare,replace,requeue", NULL };
	static const char *const wrong[] = { "", ",", "standby,", ",spare", "spares", "all,none", "stand", "spare spare", NULL };
	char why[WHY_SIZE] = "";

	for (int i = 0; right[i]; i++)
		CHECK(parse_policy(right[i], why) == 0);
	for (int i = 0; wrong[i]; i++)
		CHECK(parse_policy(wrong[i], why) == -1 && strstr(why, "standby,spare,replace,requeue"));
	CHECK(parse_policy(NULL, why) == -1);
}

static void what_the_user_says_wins_over_the_site(void)
{
	struct settings user = { .auto_resume = 0, .standby = UNSET, .spare_nodes = 2 };
	struct settings site = { .auto_resume = 1, .standby = 3, .spare_nodes = 1, .resume_policy = "spare" };
	struct settings all = merged(&user, &site);

	CHECK(all.auto_resume == 0 && all.standby == 3 && all.spare_nodes == 2);
	CHECK(strcmp(all.resume_policy, "spare") == 0);
}

static void plugstack_arguments_are_read(void)
{
	char *av[] = { "everstep=/sw/bin/everstep", "standby=2", "users=ann,bob", "groups=gpu", "auto_resume=1" };
	struct config c;

	config_read(&c, 0, NULL);
	CHECK(strcmp(c.everstep, EVERSTEP_PATH) == 0 && c.defaults.auto_resume == UNSET && !c.problem[0]);
	config_read(&c, 5, av);
	CHECK(strcmp(c.everstep, "/sw/bin/everstep") == 0 && !c.problem[0]);
	CHECK(c.defaults.auto_resume == 1 && c.defaults.standby == 2 && c.defaults.spare_nodes == UNSET);
	CHECK(config_lists(c.users, "ann") && config_lists(c.users, "bob") && !config_lists(c.users, "an"));
	CHECK(!config_lists(c.users, "") && !config_lists(NULL, "ann") && config_lists(c.groups, "gpu"));
}

static void a_wrong_plugstack_line_says_what_is_wrong(void)
{
	char *av[] = { "standby=2", "everstep=bin/everstep", "standby=x" };
	char *unknown[] = { "everstpe=/x" };
	struct config c;

	config_read(&c, 3, av);
	CHECK(strstr(c.problem, "everstep=bin/everstep") && strstr(c.problem, "full path"));
	config_read(&c, 1, unknown);
	CHECK(strstr(c.problem, "everstpe=/x"));
}

static void a_command_line_is_cut_into_words(void)
{
	char text[] = "srun\0-N2\0\0x y"; /* an empty word, and one with a blank */
	int count = 0;
	char **words = words_split(text, sizeof(text), &count);

	CHECK(words && count == 4 && !words[4]);
	CHECK(words && strcmp(words[1], "-N2") == 0 && !*words[2] && strcmp(words[3], "x y") == 0);
	free(words);
	CHECK(!words_split(text, 0, &count));
}

static bool only_in_env(const char *path)
{
	return strncmp(path, "/env/bin/", 9) == 0;
}

static bool only_torchrun(const char *path)
{
	return strstr(path, "torchrun") != NULL;
}

static void the_everstep_beside_torchrun_is_found(void)
{
	char found[64];

	CHECK(words_everstep_beside("torchrun", "/bin:/env/bin", found, sizeof(found), only_in_env) == 0);
	CHECK(strcmp(found, "/env/bin/everstep") == 0);
	CHECK(words_everstep_beside("/env/bin/python3.11", NULL, found, sizeof(found), only_in_env) == 0);
	CHECK(words_everstep_beside("torchrun", "/env/bin", found, sizeof(found), only_torchrun) == -1);
	CHECK(words_everstep_beside("torchrun", NULL, found, sizeof(found), only_in_env) == -1);
	CHECK(words_everstep_beside("hostname", "/env/bin", found, sizeof(found), only_in_env) == -1);
	CHECK(words_everstep_beside("torchrun", "/env/bin", found, 17, only_in_env) == -1);
	CHECK(words_everstep_beside("torchrun", ":", found, sizeof(found), only_torchrun) == -1);
}

static void torchrun_and_pythons_are_told_from_others(void)
{
	CHECK(words_starts_torchrun("torchrun") && words_starts_torchrun("/a/torchrun"));
	CHECK(words_starts_torchrun("python") && words_starts_torchrun("/usr/bin/python3.11"));
	CHECK(!words_starts_torchrun("pythonista") && !words_starts_torchrun("torchrun/x") && !words_starts_torchrun("bash"));
}

static void an_option_is_found_by_its_full_name(void)
{
	char *line[] = { "sbatch", "--wrap=echo", "--wrapper" };

	CHECK(words_have_option(line, 3, "--wrap"));
	CHECK(words_have_option(line, 3, "--wrapper") && !words_have_option(line, 2, "--wrapper"));
	CHECK(!words_have_option(line, 3, "--wra"));
}

static void only_a_line_with_the_token_is_heard(void)
{
	int code = -1;

	CHECK(ear_parse("everstep abcd 0\n", "abcd", &code) == 0 && code == 0);
	CHECK(ear_parse("everstep abcd 75\n", "abcd", &code) == 0 && code == 75);
	code = -1;
	CHECK(ear_parse("everstep abce 0\n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd 256\n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd -1\n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd 99999999999\n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd \n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd 0", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd 0\nx", "abcd", &code) == -1);
	CHECK(ear_parse("everstep abcd", "abcd", &code) == -1);
	CHECK(ear_parse("everstep ", "abcd", &code) == -1);
	CHECK(ear_parse("GET / HTTP/1.0\n", "abcd", &code) == -1);
	CHECK(ear_parse("everstep  0\n", "", &code) == -1);
	CHECK(ear_parse("", "abcd", &code) == -1);
	CHECK(code == -1);
}

static void an_ear_hears_the_first_code_and_no_stranger(void)
{
	char wrong[512] = "";
	const char *report = NULL;

	if (ear_open() < 0 || !(report = getenv(VAR_REPORT))) {
		CHECK(!"an ear can be opened");
		return;
	}
	snprintf(wrong, sizeof(wrong), "%s", report);
	wrong[strlen(wrong) - 1] = wrong[strlen(wrong) - 1] == '0' ? '1' : '0';
	CHECK(ear_tell(wrong, 3) == 0);
	CHECK(ear_tell(report, 7) == 0);
	CHECK(ear_tell(report, 9) == 0);
	CHECK(ear_tell("line:nowhere", 9) == -1);
	/* Callers that the thread has not come to yet are heard before it is gone. */
	CHECK(ear_close() == 7);
}

int main(void)
{
	a_switch_is_0_or_1_or_stands_alone();
	a_count_is_a_whole_number();
	a_policy_is_some_of_the_rungs();
	what_the_user_says_wins_over_the_site();
	plugstack_arguments_are_read();
	a_wrong_plugstack_line_says_what_is_wrong();
	a_command_line_is_cut_into_words();
	the_everstep_beside_torchrun_is_found();
	torchrun_and_pythons_are_told_from_others();
	an_option_is_found_by_its_full_name();
	only_a_line_with_the_token_is_heard();
	an_ear_hears_the_first_code_and_no_stranger();
	printf("%s\n", failures ? "some are not so" : "all is so");
	return failures ? 1 : 0;
}
