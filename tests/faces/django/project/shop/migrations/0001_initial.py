from django.db import migrations, models

ID = models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [migrations.CreateModel("Order", [("id", ID), ("paid", models.BooleanField(default=False))])]
